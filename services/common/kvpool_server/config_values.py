"""Turning one configuration text (a flag or an environment variable) into a typed value."""

import math
import re
import types
import typing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

_BYTE_UNITS: Final = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_BYTE_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_PLAIN_TYPES: Final = (str, int, float, bool, Path)


class BadValue(ValueError):
    """A text is not a value of its type; the message completes the sentence 'must be ...'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """What a field accepts: `base`, or None too when `optional`, or a comma list of str when `is_list`."""

    base: type
    optional: bool
    is_list: bool
    is_byte_size: bool

    @property
    def metavar(self) -> str:
        if issubclass(self.base, Enum):
            return "|".join(str(member.value) for member in self.base)
        if self.is_list:
            return "A,B,..."
        return "SIZE" if self.is_byte_size else self.base.__name__.upper()


def value_type(name: str, hint: object) -> ValueType:
    """Read a field's annotation. Raises TypeError for a type that has no textual form here."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(members) != 1:
            raise TypeError(f"{name}: {hint} is not supported, use one type or one type and None")
        optional, hint = True, members[0]
    if typing.get_origin(hint) is tuple:
        if typing.get_args(hint) != (str, ...):
            raise TypeError(f"{name}: {hint} is not supported, use tuple[str, ...]")
        return ValueType(base=str, optional=optional, is_list=True, is_byte_size=False)
    if not isinstance(hint, type) or not (hint in _PLAIN_TYPES or issubclass(hint, Enum)):
        raise TypeError(f"{name}: {hint} is not supported")
    is_byte_size = hint is int and name.endswith(("_bytes", "_bytes_per_s"))
    return ValueType(base=hint, optional=optional, is_list=False, is_byte_size=is_byte_size)


def parse_value(kind: ValueType, text: str) -> object:
    """The value that `text` stands for. Raises BadValue."""
    if kind.optional and not text:
        return None
    if kind.is_list:
        return tuple(item.strip() for item in text.split(",") if item.strip())
    if kind.is_byte_size:
        return _parse_bytes(text)
    if issubclass(kind.base, Enum):
        return _parse_enum(kind.base, text)
    if kind.base is bool:
        return _parse_bool(text)
    if kind.base is int:
        return _parse_int(text)
    if kind.base is float:
        return _parse_float(text)
    if not text and kind.base is Path:
        raise BadValue("a path")
    return Path(text) if kind.base is Path else text


def show_bytes(size_bytes: int) -> str:
    """A size in the largest unit that shows it exactly, e.g. 68719476736 as 64GiB."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def _parse_bytes(text: str) -> int:
    match = _BYTE_SIZE.fullmatch(text)
    factor = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise BadValue("a size in bytes such as 4096, 512MiB or 1.5GiB")
    size_bytes = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
    if size_bytes != int(size_bytes):
        raise BadValue("a whole number of bytes")
    return int(size_bytes)


def _parse_enum(kind: type[Enum], text: str) -> Enum:
    for member in kind:
        if str(member.value) == text:
            return member
    raise BadValue("one of " + ", ".join(str(member.value) for member in kind))


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise BadValue("true or false")


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadValue("a whole number") from None


def _parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadValue("a number") from None
    if not math.isfinite(value):
        raise BadValue("a finite number")
    return value
