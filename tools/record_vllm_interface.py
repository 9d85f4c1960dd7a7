"""Record what kvpool uses of a vLLM release: `python -m tools.record_vllm_interface DIRECTORY FILE`.

DIRECTORY holds the package `vllm`, as an unpacked wheel has it; it is read, not imported. Tests compare kvpool's
connector and tier with tests/fixtures/interfaces/vllm-VERSION.json, which this writes.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
# Names of modules that kvpool imports or subclasses: of a class what it has, of all else that it is there.
NAMES: dict[str, tuple[str, ...]] = {
    f"{_V1}.base": (
        *("KVConnectorBase_V1", "KVConnectorRole", "SupportsHMA", "KVConnectorHandshakeMetadata"),
        *("KVConnectorMetadata", "KVConnectorWorkerMetadata"),
    ),
    f"{_V1}.metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
    f"{_V1}.offloading.metrics": ("OffloadingConnectorStats",),
    f"{_V1}.offloading_connector": ("OffloadingConnector",),
    "vllm.distributed.kv_events": ("MEDIUM_STORAGE", "BlockRemoved", "BlockStored", "KVCacheEvent"),
    "vllm.distributed.utils": ("get_pp_indices",),
    "vllm.config": ("VllmConfig",),
    "vllm.config.vllm": ("VllmConfig",),
    "vllm.model_executor.models.utils": ("extract_layer_index",),
    "vllm.v1.attention.backends.cpu_attn": ("_get_attn_isa",),
    "vllm.v1.core.kv_cache_utils": ("init_none_hash",),
    "vllm.v1.core.sched.output": ("SchedulerOutput", "CachedRequestData"),
    "vllm.v1.core.sched.scheduler": ("Scheduler",),
    "vllm.v1.kv_cache_interface": (
        *("KVCacheConfig", "KVCacheGroupSpec", "KVCacheTensor", "KVCacheSpec", "AttentionSpec", "FullAttentionSpec"),
        *("SlidingWindowSpec", "MLAAttentionSpec", "ChunkedLocalAttentionSpec", "MambaSpec"),
        "UniformTypeKVCacheSpecs",
    ),
    "vllm.v1.kv_offload.base": (
        *("Locality", "LookupResult", "Medium", "OffloadKey", "OffloadPolicy", "OffloadingCounterMetadata"),
        *("OffloadingEvent", "OffloadingMetricMetadata", "OffloadingSpec", "ReqContext", "RequestOffloadingContext"),
        "ScheduleEndContext",
    ),
    "vllm.v1.kv_offload.config": (
        *("OffloadingConfig", "OffloadingGroupConfig", "OffloadingModelConfig", "OffloadingCacheConfig"),
        "OffloadingParallelConfig",
    ),
    "vllm.v1.kv_offload.file_mapper": ("FileMapper",),
    "vllm.v1.kv_offload.tiering.base": ("JobResult", "SecondaryTierManager", "TransferJob"),
    "vllm.v1.kv_offload.tiering.factory": ("SecondaryTierFactory",),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
    "vllm.v1.outputs": ("KVConnectorOutput",),
    "vllm.v1.request": ("Request",),
}


@dataclass(slots=True)
class RecordedClass:
    """Of one class: its bases by name; annotated fields with whether they have a default; attributes that its
    constructor sets; properties; parameters of its methods, as `name`, `name=` with a default, `*name`, `**name`, and
    `*` before those that are given by name only."""

    bases: list[str]
    fields: dict[str, bool] = field(default_factory=dict)
    attributes: list[str] = field(default_factory=list)
    properties: list[str] = field(default_factory=list)
    abstract: list[str] = field(default_factory=list)
    calls: dict[str, list[str]] = field(default_factory=dict)


def record(directory: Path) -> dict[str, Any]:
    """The description of the release in `directory`. raises: FileNotFoundError without a vllm there."""
    version = re.search(r"__version__ = version = ['\"]([^'\"]+)", (directory / "vllm/_version.py").read_text())
    modules: dict[str, dict[str, Any]] = {}
    for module, names in NAMES.items():
        path = directory / module.replace(".", "/")
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if file.is_file():
            modules[module] = {name: value for name in names if (value := _found(file, name)) is not None}
    return {
        "package": "vLLM",
        "version": version[1] if version else "",
        "recorded": datetime.now(UTC).date().isoformat(),
        "modules": modules,
    }


def _found(file: Path, name: str) -> Any:
    """What a module has by that name: of a class its description, of all else an empty one; None if it has none."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _described(_class(node))
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return {"parameters": _parameters(node)}
        if isinstance(node, ast.ImportFrom) and name in {one.asname or one.name for one in node.names}:
            return {}
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if name in {target.id for target in targets if isinstance(target, ast.Name)}:
            return {}
        if isinstance(node, ast.Constant) and node.value == name and file.name == "__init__.py":
            return {}  # imported when it is asked for
    return None


def _class(node: ast.ClassDef) -> RecordedClass:
    found = RecordedClass([ast.unparse(base) for base in node.bases])
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            found.fields[one.target.id] = one.value is not None
        elif isinstance(one, ast.Assign):
            found.attributes += [target.id for target in one.targets if isinstance(target, ast.Name)]
        elif isinstance(one, ast.FunctionDef):
            marks = {ast.unparse(mark).rpartition(".")[2] for mark in one.decorator_list}
            if "abstractmethod" in marks:
                found.abstract.append(one.name)
            if marks & {"property", "cached_property"}:
                found.properties.append(one.name)
            else:
                found.calls[one.name] = _parameters(one)[0 if "staticmethod" in marks else 1 :]
            if one.name in ("__init__", "__post_init__"):
                found.attributes += sorted(_set_attributes(one) - set(found.attributes))
    return found


def _set_attributes(constructor: ast.FunctionDef) -> set[str]:
    return {
        one.attr
        for one in ast.walk(constructor)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }


def _parameters(function: ast.FunctionDef) -> list[str]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    with_default = len(positional) - len(given.defaults)
    names = [one.arg + "=" * (at >= with_default) for at, one in enumerate(positional)]
    if given.vararg:
        names.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        names.append("*")
    names += [
        one.arg + "=" * (default is not None) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return [*names, *([f"**{given.kwarg.arg}"] if given.kwarg else [])]


def _described(found: RecordedClass) -> dict[str, Any]:
    values = {name: getattr(found, name) for name in RecordedClass.__slots__}
    return {name: value for name, value in values.items() if value or name == "bases"}


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.record_vllm_interface", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(record(arguments.directory), indent=1)
    text = re.sub(r"[\[{]\s+([^\[\]{}]*?)\s+([\]}])", lambda one: one[0][0] + " ".join(one[1].split()) + one[2], text)
    arguments.file.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
