"""Options of a request in vLLM's `kv_transfer_params`: {"kvpool": {"store": false, ...}}."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.core.errors import InvalidRequest
from kvpool.core.retention import PINNED_FOREVER_US, Retention

KEY = "kvpool"  # other connectors have keys of their own beside it
_TTL_S_MAX = 100 * 365 * 86_400


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of one request.

    load: whether its prefix may be loaded. store: whether what it computes is stored. retention: of all its chunks,
    those that the pool already has included; None for the keyspace's default. refused: why the options could not be
    read.
    """

    load: bool = True
    store: bool = True
    retention: Retention | None = None
    refused: str = ""

    @classmethod
    def of(cls, params: Mapping[str, Any] | None, wall_us: Callable[[], int]) -> RequestOptions:
        """Parse a request's kv_transfer_params. wall_us: time in microseconds since the epoch.

        If any option cannot be read, the request neither loads nor stores, as it may have asked for that.
        """
        options = params.get(KEY) if isinstance(params, Mapping) else None
        if options is None:
            return _DEFAULT
        try:
            return _read(options, wall_us)
        except InvalidRequest as error:
            return cls(load=False, store=False, refused=error.message)


_DEFAULT = RequestOptions()
_shown = reprlib.repr  # of what a client sent: as long as it likes


def _read(options: Any, wall_us: Callable[[], int]) -> RequestOptions:
    name = f"kv_transfer_params.{KEY}"
    if not isinstance(options, Mapping):
        raise InvalidRequest(f"{name} must be an object, got {_shown(options)}")
    unknown = next((key for key in options if key not in _KINDS), None)
    if unknown is not None:
        raise InvalidRequest(f"{name} has no {_shown(unknown)}; it has {', '.join(_KINDS)}")
    for key, value in options.items():
        kind, kind_name = _KINDS[key]
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise InvalidRequest(f"{name}.{key} must be {kind_name}, got {_shown(value)}")
    ttl_s, priority, pin = options.get("ttl_s", 0), options.get("priority", 0), options.get("pin", False)
    if "ttl_s" in options and not 0.001 <= ttl_s <= _TTL_S_MAX:  # nor NaN
        raise InvalidRequest(f"{name}.ttl_s must be from 0.001 to {_TTL_S_MAX} seconds, got {_shown(ttl_s)}")
    pinned_until_us = (wall_us() + round(ttl_s * 1e6) if ttl_s else PINNED_FOREVER_US) if pin else 0
    retention = Retention(ttl_ms=round(ttl_s * 1e3), priority=priority, pinned_until_us=pinned_until_us)
    retention.check(name)
    return RequestOptions(
        load=options.get("load", True),
        store=options.get("store", True),
        retention=retention if retention != Retention() else None,
    )


_KINDS: dict[str, tuple[Any, str]] = {
    "load": (bool, "true or false"),
    "store": (bool, "true or false"),
    "ttl_s": ((int, float), "a number of seconds"),
    "pin": (bool, "true or false"),
    "priority": (int, "a whole number"),
}
