"""Service configuration: flags and environment variables derived from one frozen dataclass.

A field is written as `data_dir: Annotated[Path, "where pages live"]`; the default is the dataclass's own, a field
without one is required. `queue_limit` becomes the flag `--queue-limit` and the variable `<PREFIX>_QUEUE_LIMIT`.
Precedence: flag, then environment, then default. An environment variable that is set but empty counts as unset
(compose files and charts produce those); an empty flag is taken as given.

Mark secrets with `SECRET`: `token: Annotated[str, "bearer token", SECRET]`. They have no flag (every user of the host
can read a command line), are never shown in --help, and `describe` masks them. In Kubernetes, switch
`enableServiceLinks` off: it injects variables such as KVPOOL_INDEX_PORT that could be taken for ours.
"""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

from kvpool.core.byte_sizes import exact_size_text, size_from_text
from kvpool.core.errors import StartupFailed

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


def _parse_bytes(text: str) -> int:
    try:
        return size_from_text(text)
    except ValueError:
        raise BadValue("a whole number of bytes such as 4096, or 512MiB, 1.5Gi, 2GB") from None


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


ConfigT = TypeVar("ConfigT")

_MASK: Final = "***"


class _Secret:
    """Type of the SECRET marker."""


SECRET: Final = _Secret()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One field of the configuration class and the two names it can be set by."""

    name: str
    flag: str
    variable: str
    type: ValueType
    help: str
    secret: bool
    default: object  # MISSING when required

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def label(self) -> str:
        return f"env {self.variable}" if self.secret else f"{self.flag} (env {self.variable})"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartupFailed(f"{message}; see --help")


def load_config(
    cls: type[ConfigT], *, prog: str, env_prefix: str, argv: Sequence[str], env: Mapping[str, str]
) -> ConfigT:
    """Build `cls` from the command line `argv` (without the program name), the environment and the defaults.

    Raises StartupFailed with one line that names the flag and variable at fault. `--help` prints and exits 0.
    """
    options = _options(cls, env_prefix)
    flags = vars(_parser(prog, cls, options).parse_args(list(argv)))
    values: dict[str, object] = {}
    missing: list[str] = []
    for option in options:
        text = flags.get(option.name, env.get(option.variable) or None)
        if text is not None:
            values[option.name] = _parse(option, text)
        elif option.required:
            missing.append(option.label)
    if missing:
        raise StartupFailed(f"missing {', '.join(missing)}")
    try:
        return cls(**values)
    except ValueError as error:
        raise StartupFailed(f"bad configuration: {error}") from error


@dataclass(frozen=True, slots=True)
class OptionText:
    """One setting as a page of the documents shows it."""

    flag: str  # empty for a secret, which has a variable only
    variable: str
    values: str  # what it accepts: SIZE, INT, PATH, or the choices
    default: str
    help: str


def option_texts(cls: type, *, env_prefix: str) -> list[OptionText]:
    """All settings of a configuration class, in the order of its fields."""
    return [
        OptionText(
            flag="" if option.secret else option.flag,
            variable=option.variable,
            values="true or false" if option.type.base is bool else option.type.metavar,
            default="required" if option.required else _show(option, option.default),
            help=option.help,
        )
        for option in _options(cls, env_prefix)
    ]


def describe(config: object) -> dict[str, str]:
    """The effective configuration as text for the startup log, secrets and passwords in URLs masked."""
    shown: dict[str, str] = {}
    for option in _options(type(config), ""):
        value = getattr(config, option.name)
        shown[option.name] = _MASK if option.secret and value else _show(option, value)
    return shown


def _options(cls: type, env_prefix: str) -> list[_Option]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} must be a dataclass")
    hints = typing.get_type_hints(cls, include_extras=True)
    return [_option(field, hints[field.name], env_prefix) for field in dataclasses.fields(cls) if field.init]


def _option(field: "dataclasses.Field[Any]", hint: object, env_prefix: str) -> _Option:
    notes: tuple[object, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, *rest = typing.get_args(hint)
        notes = tuple(rest)
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    return _Option(
        name=field.name,
        flag="--" + field.name.replace("_", "-"),
        variable=f"{env_prefix}_{field.name}".upper(),
        type=value_type(field.name, hint),
        help=next((note for note in notes if isinstance(note, str)), ""),
        secret=any(isinstance(note, _Secret) for note in notes),
        default=default,
    )


def _parser(prog: str, cls: type, options: Sequence[_Option]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description=(cls.__doc__ or "").strip().split("\n\n")[0],
        epilog=_secret_help(options),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in options:
        if option.secret:
            continue
        text = _help_line(option).replace("%", "%%")
        if option.type.base is bool:
            # `help` goes through a fresh action: BooleanOptionalAction would append its own "(default: ...)".
            parser.add_argument(option.flag, dest=option.name, action="store_const", const="true", help=text)
            no_flag = "--no-" + option.flag.removeprefix("--")
            parser.add_argument(no_flag, dest=option.name, action="store_const", const="false", help=argparse.SUPPRESS)
        else:
            parser.add_argument(option.flag, dest=option.name, metavar=option.type.metavar, help=text)
    return parser


def _help_line(option: _Option) -> str:
    opposite = f"; off with --no-{option.flag.removeprefix('--')}" if option.type.base is bool else ""
    default = "required" if option.required else f"default: {_show(option, option.default)}"
    return f"{option.help}{opposite} [env {option.variable}; {default}]".strip()


def _secret_help(options: Sequence[_Option]) -> str | None:
    lines = [f"  {option.variable:<32} {option.help}" for option in options if option.secret]
    return "\n".join(["secrets, from the environment only:", *lines]) if lines else None


def _parse(option: _Option, text: str) -> object:
    try:
        return parse_value(option.type, text)
    except BadValue as error:
        got = "" if option.secret else f", got {_mask_url(text)!r}"
        raise StartupFailed(f"{option.label} must be {error}{got}") from None


def _show(option: _Option, value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(_mask_url(str(item)) for item in value)
    if option.type.is_byte_size and isinstance(value, int):
        return exact_size_text(value)
    return _mask_url(str(value))


def _mask_url(text: str) -> str:
    """Hide the password of a URL such as redis://user:password@host."""
    try:
        password = urlsplit(text).password
    except ValueError:
        return text
    return text.replace(f":{password}@", f":{_MASK}@") if password else text
