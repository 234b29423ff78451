"""Options of commands, derived from pydantic models: name, type, bound, default and help of an option are those of its field.

A command takes option models as parameters::

    @command(Mode("--infer", when=lambda values: values["infer"], takes=(GenerationOptions,), why="plans no training"), ...)
    def plan(model: ModelArgument, generation: GenerationOptions | None, training: TrainingOptions | None) -> None: ...

Each mode states the models it takes. A model that the chosen mode does not take arrives as None, so that the command cannot read
it, and an option of it that was typed is refused: none is accepted and ignored.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import typer
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import OptionInfo

from ..schema.base import Frozen, OptionSpec, field_texts
from ..schema.errors import ConfigError
from .terminal import exit_on_error

_NO_LIMIT = 10**9
"""Bounds from here on keep numbers computable and say nothing to a user."""

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}


class OptionModel(Frozen):
    """Abstract base of models that exist for the command line only.

    Attributes:
        mirrors: the model whose fields of the same names give help, bound and default, where this one does not document them.
    """

    mirrors: ClassVar[type[BaseModel] | None] = None


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to use a command; the first one whose ``when`` holds is chosen, the last one always holds.

    Attributes:
        name: what chooses it, as a message says it: ``--infer``; empty where nothing does.
        takes: the option models that apply.
        without: fields of these that do not apply all the same.
        why: why others do not apply: ``plans no training``.
        fix: what to do instead where an option does not apply or is missing. Default: leave it out, or add it.
    """

    takes: tuple[type[BaseModel], ...]
    name: str = ""
    when: Callable[[Mapping[str, Any]], bool] = lambda values: True
    without: frozenset[str] = frozenset()
    why: str = ""
    fix: str = ""

    def takes_field(self, model: type[BaseModel], name: str) -> bool:
        """Say whether an option applies."""
        return model in self.takes and name not in self.without


@dataclass(frozen=True)
class CommandOptions:
    """The option models of a command and its modes.

    Attributes:
        models: parameter of the command -> its option model.
        omitted: fields that are no options.
    """

    models: Mapping[str, type[BaseModel]]
    modes: tuple[Mode, ...]
    omitted: frozenset[str]

    def fields(self) -> Iterator[tuple[type[BaseModel], str, FieldInfo]]:
        """Yield every option: its model, name and field."""
        for model in self.models.values():
            for name, field in option_fields(model).items():
                if name not in self.omitted:
                    yield model, name, field

    def mode(self, values: Mapping[str, Any]) -> Mode:
        """Return the mode that the values choose."""
        return next(mode for mode in self.modes if mode.when(values))

    def is_in_every_mode(self, model: type[BaseModel]) -> bool:
        """Say whether all modes take a model."""
        return all(model in mode.takes for mode in self.modes)

    def require_meant(self, values: Mapping[str, Any], typed: frozenset[str]) -> None:
        """Refuse options that mean nothing in the mode or without another option, and modes that lack an option they need.

        Raises:
            ConfigError: the options by name, why, and the fix.
        """
        mode = self.mode(values)
        applicable = {name: field for model, name, field in self.fields() if mode.takes_field(model, name)}
        strange = [(model, name) for model, name, _ in self.fields() if name in typed and name not in applicable]
        if strange:
            raise self._refusal(mode, strange)
        for name, field in applicable.items():
            needed = tuple(other for other in option_spec(field).needs if other in applicable)
            if name in typed and needed and not any(_is_set(values[other], applicable[other]) for other in needed):
                others = " or ".join(option_name(other, applicable[other]) for other in needed)
                raise ConfigError(
                    f"{option_name(name, field)} without {others}",
                    help=f"add {_example(needed[0], applicable[needed[0]])}",
                )
            barring = [other for other in option_spec(field).barred_by if other in applicable]
            if name in typed and (bars := [o for o in barring if _is_set(values[o], applicable[o])]):
                other = option_name(bars[0], applicable[bars[0]])
                raise ConfigError(
                    f"{option_name(name, field)} means nothing with {other}", help="leave one of them out"
                )
        for name, field in applicable.items():
            if field.is_required() and values[name] is None:
                raise _missing(mode, option_name(name, field), _example(name, field))

    def condition(self, model: type[BaseModel], name: str, field: FieldInfo) -> str:
        """Return the beginning of an option's help that says when it applies: ``With --nvme: ``."""
        fields = {other: entry for _, other, entry in self.fields()}
        owners = {other: owner for owner, other, _ in self.fields()}
        takers = [mode for mode in self.modes if mode.takes_field(model, name)]
        needed = [other for other in option_spec(field).needs if other in fields]
        if needed:
            takers = [mode for mode in takers if not any(mode.takes_field(owners[other], other) for other in needed)]
        words = [option_name(other, fields[other]) for other in needed] + [mode.name for mode in takers if mode.name]
        is_conditional = bool(needed) or all(mode.name for mode in takers)
        return f"With {' or '.join(words)}: " if is_conditional and words and len(takers) < len(self.modes) else ""

    def _refusal(self, mode: Mode, strange: list[tuple[type[BaseModel], str]]) -> ConfigError:
        fields = {name: field for _, name, field in self.fields()}
        shown = [option_name(name, fields[name]) for _, name in strange]
        takers = [other.name for other in self.modes if all(other.takes_field(*option) for option in strange)]
        if not mode.name and all(takers):
            return ConfigError(f"{', '.join(shown)} without {' or '.join(takers)}", help=f"add {takers[0]}")
        why = f", which {mode.why}" if mode.why else ""
        return ConfigError(
            f"{', '.join(shown)} with {mode.name}{why}", help=mode.fix or f"leave out {' and '.join(shown)}"
        )


def command(*modes: Mode, omit: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function with option models among its parameters a command of typer.

    Without modes every option applies always. Errors of ours end it with their message and exit code.

    Args:
        omit: fields of the models that are no options.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        models = {name: model for name, hint in hints.items() if (model := _model_in(hint)) is not None}
        options = CommandOptions(models, modes or (Mode(takes=tuple(models.values())),), frozenset(omit))
        parameters = [_CONTEXT]
        for name, parameter in inspect.signature(function).parameters.items():
            if name in models:
                parameters += _parameters(options, models[name])
            elif name != _CONTEXT.name:
                parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(function)
        def run(context: typer.Context, **values: Any) -> None:
            with exit_on_error():
                typed = frozenset(name for name in values if _is_typed(context, name))
                options.require_meant(values, typed)
                if _CONTEXT.name in hints:
                    values["context"] = context
                function(**_arguments(options, values))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.command_options = options  # type: ignore[attr-defined]
        return run

    return decorate


_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def option_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model; those that only the model it mirrors documents are that one's."""
    mirrored, documented = getattr(model, "mirrors", None), field_texts(model)
    others = {} if mirrored is None else mirrored.model_fields
    return {
        name: others[name] if name in others and name not in documented else field
        for name, field in model.model_fields.items()
    }


def option_name(name: str, field: FieldInfo) -> str:
    """Return an option as it is typed: ``--seq-len``."""
    return option_spec(field).name or "--" + name.replace("_", "-")


def option_spec(field: FieldInfo) -> OptionSpec:
    """Return what a field says of itself as an option."""
    return next((entry for entry in _metadata(field) if isinstance(entry, OptionSpec)), OptionSpec())


def _model_in(hint: Any) -> type[BaseModel] | None:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((kind for kind in members if inspect.isclass(kind) and issubclass(kind, BaseModel)), None)


def _parameters(options: CommandOptions, model: type[BaseModel]) -> Iterator[inspect.Parameter]:
    texts = _texts(model)
    is_conditional = not options.is_in_every_mode(model)
    for owner, name, field in options.fields():
        if owner is model:
            condition = options.condition(model, name, field)
            kind, info = _typer_option(
                name, field, condition + _sentence(texts.get(name, ""), field, begins=not condition)
            )
            default = _default(field)
            if field.is_required() and is_conditional:
                kind, default, info.help = kind | None, None, f"{info.help} Needed."
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
            )


def _typer_option(name: str, field: FieldInfo, text: str) -> tuple[Any, OptionInfo]:
    """Return the type that typer reads an option as, and its names, help and bounds."""
    spec = option_spec(field)
    kind, optional = _plain_type(field.annotation)
    is_list = get_origin(kind) is tuple
    inner = get_args(kind)[0] if is_list else kind
    bounds = _bounds(field, inner) if inner in (int, float) else {}
    info = typer.Option(
        option_name(name, field),
        metavar=spec.metavar or _METAVARS.get(inner),
        help=text,
        autocompletion=spec.complete,
        show_default=True,
        **bounds,
    )
    kind = list[inner] if is_list else kind
    return (kind | None if optional or is_list else kind), info


def _plain_type(annotation: Any) -> tuple[Any, bool]:
    """Return an annotation without its metadata and without None, and whether None was part of it."""
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [_plain_type(member)[0] for member in get_args(annotation) if member is not NoneType]
        return members[0], True
    return annotation, False


def _metadata(field: FieldInfo) -> list[Any]:
    """Return what stands in the Annotated of a field and of the members of its union."""
    found = list(field.metadata)
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        if get_origin(annotation) is Annotated:
            found += get_args(annotation)[1:]
        pending += [] if get_origin(annotation) is Literal else get_args(annotation)
    return [inner for entry in found for inner in (entry.metadata if isinstance(entry, FieldInfo) else (entry,))]


def _bounds(field: FieldInfo, kind: type) -> dict[str, float]:
    bounds: dict[str, float] = {}
    for limit in _metadata(field):
        if isinstance(limit, Ge):
            bounds["min"] = limit.ge  # type: ignore[assignment]
        elif isinstance(limit, Gt) and kind is int:
            bounds["min"] = limit.gt + 1  # type: ignore[operator]
        elif isinstance(limit, Le) and limit.le < _NO_LIMIT:  # type: ignore[operator]
            bounds["max"] = limit.le  # type: ignore[assignment]
    return bounds


def _default(field: FieldInfo) -> Any:
    default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
    return None if default == () else default


def _texts(model: type[BaseModel]) -> dict[str, str]:
    """Return what the docstrings of a model, of its bases and of what it mirrors say of each field; the nearest counts."""
    sources = [source for source in (getattr(model, "mirrors", None), model) if source is not None]
    kinds = [kind for source in sources for kind in reversed(source.__mro__) if getattr(kind, "model_fields", None)]
    return {name: text for kind in kinds for name, text in field_texts(kind).items()}


def _sentence(text: str, field: FieldInfo, *, begins: bool) -> str:
    """Return a text with a full stop, and where it begins the help with a capital, unless it begins with a value or a name."""
    text = text.replace("``", "`").strip()
    first = text.split(maxsplit=1)[0].rstrip(":,") if text else ""
    is_word = begins and first.replace("-", "").isalpha() and first not in _choices(field)
    return (text[0].upper() + text[1:] if is_word else text) + ("" if not text or text[-1] == "." else ".")


def _choices(field: FieldInfo) -> tuple[Any, ...]:
    kind, _ = _plain_type(field.annotation)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _is_set(value: Any, field: FieldInfo) -> bool:
    return value is not None and value != _default(field)


def _missing(mode: Mode, option: str, example: str) -> ConfigError:
    if mode.name:
        return ConfigError(f"{mode.name} without {option}", help=f"add {example}")
    return ConfigError(f"Missing option '{option}'", help=mode.fix or f"add {example}")


def _example(name: str, field: FieldInfo) -> str:
    """Return an option with a value that sets it: ``--offload auto``, ``--nvme PATH``."""
    kind, _ = _plain_type(field.annotation)
    choice = next((choice for choice in _choices(field) if choice != field.default), None)
    value = choice or option_spec(field).metavar or _METAVARS.get(kind, "")
    return f"{option_name(name, field)} {value}".rstrip()


def _arguments(options: CommandOptions, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the function is called with: its models in place of their fields, None for those the mode does not take."""
    mode = options.mode(values)
    names = {name for _, name, _ in options.fields()}
    arguments = {name: value for name, value in values.items() if name not in names}
    for parameter, model in options.models.items():
        given = {name: values[name] for owner, name, _ in options.fields() if owner is model}
        fields = {name: value for name, value in given.items() if value is not None}
        arguments[parameter] = model(**fields) if model in mode.takes else None
    return arguments
