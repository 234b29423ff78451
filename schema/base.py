"""Base of all documents and their parts: frozen, strict about unknown fields, our own errors, JSON files written atomically."""

from __future__ import annotations

import difflib
import inspect
import io
import json
import os
import re
import reprlib
import tempfile
import textwrap
import tomllib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from .errors import ConfigError
from .limits import MAX_COUNT, MAX_TEXT_BYTES

SCHEMA_VERSION = 1
"""Version of the JSON form of every document; raised when a field changes its meaning or goes."""

_UMASK = os.umask(0o077)  # it can only be read by setting it
os.umask(_UMASK)

Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
"""A count that a user states: positive, and small enough to compute with."""

CountOrNone = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A count that may be zero."""

PositiveInt = Annotated[int, Field(gt=0, le=2**62)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**62)]
"""Integers that an array of 64-bit integers can hold."""


def _not_vanishing(value: float) -> float:
    if value < 1e-60:
        raise ValueError("it is too small to compute with")
    return value


PositiveFloat = Annotated[float, Field(gt=0, le=1e60), AfterValidator(_not_vanishing)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e60)]
"""Numbers whose products and quotients are finite."""


class Frozen(BaseModel):
    """Abstract base of all data: immutable, hashable, no unknown fields, no NaN.

    Raises:
        ConfigError: where pydantic would raise ValidationError, with one line for each wrong field.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _config_error(type(self).__name__, error) from None

    # One that is a field of another is validated as such, so that an error names its place: `groups.0.device.memory_bytes`.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


class Component(Frozen):
    """Abstract base of the layers of a model and their parts."""

    @abstractmethod
    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters with biases; of what is shared with another layer none."""

    def num_active_params(self, hidden_dim: int) -> int:
        """Return the parameters that one token goes through."""
        return self.num_params(hidden_dim)


class Mixer(Component):
    """Abstract base of what mixes the tokens of a block: attention, or what stands in its place.

    A new kind is a class in layers.py or recurrences.py that joins `layers.Attention`, its operators and saved bytes (registered
    for the class in cost_models/layer/) and its module in runtime/models/decoder.py.

    Attributes:
        is_attention: it has scores for pairs of tokens: unfused they are stored, and context parallelism passes keys and values on.
        passes_state: it has none, and what it knows of earlier tokens is a state that ranks pass on (recurrences.py).
    """

    is_attention: ClassVar[bool] = True
    passes_state: ClassVar[bool] = False


class Document(Frozen):
    """Abstract base of the documents that live in files of their own (plan.json, profile.json)."""

    document_kind: ClassVar[str] = "document"
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def class_of(cls, _data: dict[str, Any]) -> type[Self]:
        """Return the class of a document that this one is the base of."""
        return cls

    def save(self, path: str | Path) -> None:
        """Write the JSON form; the file is either the old one or the complete new one."""
        write_atomically(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the JSON form.

        Raises:
            ConfigError: the file is missing, not JSON, truncated, of a newer schema or not this kind of document.
        """
        data = read_json(path)
        kind = cls.document_kind
        if not isinstance(data, dict) or "schema_version" not in data:
            raise ConfigError(f"{path} is not a {kind} file: it has no schema_version")
        version = data["schema_version"]
        if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= SCHEMA_VERSION:
            raise ConfigError(
                f"{path} has schema version {shown(version)}; this meshwright reads 1 to {SCHEMA_VERSION}",
                help="install a newer meshwright, or write the file again with this one",
            )
        try:
            return cls.class_of(data)(**data)
        except ConfigError as error:
            raise ConfigError(f"{path} is not a valid {kind} file", details=(error.message, *error.details)) from None


@contextmanager
def located(place: str) -> Iterator[None]:
    """Put the place where it was met before the message of a ConfigError; an empty one is none."""
    try:
        yield
    except ConfigError as error:
        message = f"{place}: {error.message}" if place else error.message
        raise type(error)(message, details=error.details, help=error.help) from None


def is_file(path: str | Path) -> bool:
    """Say whether there is a file of this name; a text that no file can be called, of any length, is none."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises where the name is too long


def read_text(path: str | Path) -> str:
    """Read the text of a file the user named; every way this fails is a ConfigError."""
    try:
        content = bytearray()
        with Path(path).open("rb") as file:
            while part := file.read(2**20):  # in parts, as a read of the limit would take the memory of the limit
                content += part
                if len(content) > MAX_TEXT_BYTES:
                    raise ConfigError(f"cannot read {path}: it has more than {MAX_TEXT_BYTES // 2**20} MiB")
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: byte {error.start} is not UTF-8") from None
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None


def read_json(path: str | Path) -> Any:
    """Parse the JSON of a file the user named; every way this fails is a ConfigError."""
    text = read_text(path)
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}",
            help="the file may be truncated; write it again" if error.pos >= len(text.rstrip()) - 1 else None,
        ) from None
    except (RecursionError, ValueError) as error:  # a ValueError is an integer of thousands of digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} is not usable JSON: {reason}") from None
    if has_half_a_character(content, text):
        raise ConfigError(f"{path} {HALF_A_CHARACTER}")
    return content


HALF_A_CHARACTER = "has half of a character (\\ud800 to \\udfff), which is no text"


def has_half_a_character(content: Any, text: str) -> bool:
    """Tell whether what JSON or YAML text stands for has half of a character, which can be escaped and not be written."""
    if "\\ud" not in text.lower():
        return False
    try:
        json.dumps(content, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError:
        return True
    return False


def read_toml(path: str | Path) -> dict[str, Any]:
    """Parse the TOML of a file the user named; every way this fails is a ConfigError."""
    text = read_text(path)
    try:
        return parse_toml(text)
    except (ValueError, RecursionError) as error:  # ValueError: TOMLDecodeError, and int() of more than 4300 digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){100}""")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; a name of 100,000 parts, which takes tomllib 40 GB, is refused.

    Raises:
        ValueError, RecursionError: it is none.
    """
    if _LONG_KEY.search(text):
        raise ValueError("a name has more than 100 parts")
    return tomllib.loads(text)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a complete file or nothing, where a link leads to.

    Raises:
        ConfigError: the folder is missing or cannot be written.
    """
    replace_atomically(Path(os.path.realpath(path)), content)


def replace_atomically(path: Path, content: str | bytes) -> None:
    """Write a complete file or nothing, in place of a link: a temporary file in the same folder, then a rename.

    Raises:
        ConfigError: the folder is missing or cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"cannot write {path}: it is not a regular file")
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            let_be_read(file)
        Path(temporary).replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:  # an interrupt leaves nothing behind either
        Path(temporary).unlink(missing_ok=True)


def let_be_read(file: IO[bytes]) -> None:
    """Give a temporary file the rights that the umask leaves a new one, by its handle: its name may lead elsewhere by now."""
    os.fchmod(file.fileno(), 0o666 & ~_UMASK)


def require_writable(path: str | Path) -> None:
    """Refuse a path that cannot be written, before long work whose result would go there.

    Raises:
        ConfigError: its folder is missing or may not be written.
    """
    folder = Path(os.path.realpath(path)).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"cannot write {path}: its folder is not there, or may not be written")


def _config_error(kind: str, error: ValidationError) -> ConfigError:
    items = error.errors(include_url=False, include_context=False)
    lines = tuple(_describe(item) for item in items if item["type"] != "default_factory_not_called")
    if len(lines) == 1:
        return ConfigError(f"{kind}: {lines[0]}")
    return ConfigError(f"{kind} has {len(lines)} wrong fields", details=lines)


def reason_of(error: ValueError | ConfigError, document: type[Frozen]) -> str:
    """Return what is wrong with the text of an option, without the name of what it makes."""
    return error.message.removeprefix(f"{document.__name__}: ") if isinstance(error, ConfigError) else str(error)


def _describe(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    text = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "missing":
        return f"field `{where}` is missing"
    if item["type"] == "extra_forbidden":
        return f"unknown field `{where}`"
    return f"{where} = {shown(item['input'])}: {text}" if where else text


def shown(value: object) -> str:
    """Show a value in a message: short, even if it is nested in itself."""
    if isinstance(value, int) and value.bit_length() > 128:  # beyond 4300 digits Python refuses to print one
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > 60:
        value = value[:60]
    text = repr(value) if value is None or isinstance(value, bool | int | float | str) else _NESTED.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(name: str, known: Iterable[str] | Mapping[str, str], *, limit: int = 3, cutoff: float = 0.5) -> str:
    """Suggest the nearest of the ``known`` names, of a mapping what they stand for; empty where none is near."""
    meanings = known if isinstance(known, Mapping) else {spelling.lower(): spelling for spelling in known}
    name = name.lower()
    close = [name] if name in meanings else difflib.get_close_matches(name, meanings, n=limit, cutoff=cutoff)
    near = dict.fromkeys(meanings[match] for match in close)
    return f"did you mean {' or '.join(near)}?" if near else ""


class _Nested(reprlib.Repr):
    """Show the outermost few levels of nested values; an integer of thousands of digits as its size."""

    def repr_int(self, x: int, level: int) -> str:
        return shown(x)


_NESTED = _Nested()
_NESTED.maxlevel = 3


class OptionSpec(NamedTuple):
    """What an ``Annotated`` field says of itself as an option of a command, where its name and type leave that open.

    Attributes:
        metavar: what stands for the value in the help.
        name: the option, where it is not the field's name: ``--compile``.
        needs: fields of which one must be set for this one to mean anything.
        barred_by: fields that leave this one without meaning once they are set.
        complete: what the shell offers for a beginning.
        parse: reads the value from text, or raises a ValueError that says what is wrong with it.
        is_option: False: it is set in Python only.
    """

    metavar: str | None = None
    name: str | None = None
    needs: tuple[str, ...] = ()
    barred_by: tuple[str, ...] = ()
    complete: Callable[[str], list[str]] | None = None
    parse: Callable[[str], Any] | None = None
    is_option: bool = True


def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return what the section "Attributes:" of a model's docstring says of each field.

    Entries are "a: text", "a, b: text" and "a, b: text; c: text".

    Raises:
        ValueError: an entry begins with no field.
    """
    _, _, attributes = inspect.cleandoc(model.__doc__ or "").partition("\nAttributes:\n")
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?! )", textwrap.dedent(attributes).strip()) if attributes else ():
        names: list[str] = []
        for part in " ".join(entry.split()).split("; "):
            head, _, text = part.partition(": ")
            if all(name in model.model_fields for name in head.split(", ")):
                names = head.split(", ")
                texts |= dict.fromkeys(names, text)
            elif names:
                texts |= {name: f"{texts[name]}; {part}" for name in names}
            else:
                raise ValueError(f"{model.__name__}: {head!r} is documented and not a field")
    return texts
