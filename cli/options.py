"""Options of commands, derived from pydantic models: name, type, bound, default and help of an option are those of its field.

A command takes option models as parameters::

    @command(Mode("--infer", when=lambda values: values["infer"], takes=(GenerationOptions,), why="plans no training"), ...)
    def plan(model: ModelArgument, generation: GenerationOptions | None, training: TrainingOptions | None) -> None: ...

Each mode states the models it takes. A model that the chosen mode does not take arrives as None, so that the command cannot read
it, and an option of it that was typed is refused: none is accepted and ignored.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import typer
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo
from typer.core import TyperGroup

from ..schema.base import Frozen, OptionSpec, field_texts
from ..schema.errors import ConfigError
from ..schema.limits import MAX_COUNT
from ..schema.units import parse_count, parse_number
from .complete import complete_models
from .terminal import INTERRUPTED, exit_on_error, exit_with

if TYPE_CHECKING:
    from ..schema import ClusterSpec, ModelSpec, Workload

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def option(default: Any, text: str, *, ge: float | None = None, le: float | None = None, **spec: Any) -> Any:
    """Return a field of an option model: its default (... for none), help and bounds; ``spec`` are fields of `OptionSpec`."""
    return Field(default, description=text, ge=ge, le=le, json_schema_extra={"option": OptionSpec(**spec)})


class OptionModel(Frozen):
    """Abstract base of models that exist for the command line only.

    Attributes:
        mirrors: the model whose fields of the same names give help, bound and default to those without a text here.
    """

    mirrors: ClassVar[type[BaseModel] | None] = None

    def in_force(self) -> AbstractContextManager[Any]:
        """Return what holds while the command runs: nothing, but for models that say otherwise."""
        return nullcontext()


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

    def takes_option(self, option: Option) -> bool:
        """Return whether an option applies."""
        return option.model in self.takes and option.name not in self.without


@dataclass(frozen=True)
class Option:
    """A field of an option model, as an option."""

    model: type[BaseModel]
    name: str
    field: FieldInfo
    text: str

    @functools.cached_property
    def metadata(self) -> list[Any]:
        """Return what stands in the Annotated of the field and of the members of its union."""
        entries, pending = list(self.field.metadata), [self.field.annotation]
        for annotation in pending:
            if get_origin(annotation) is Annotated:
                entries += get_args(annotation)[1:]
            pending += [] if get_origin(annotation) is Literal else get_args(annotation)
        return [inner for entry in entries for inner in (entry.metadata if isinstance(entry, FieldInfo) else (entry,))]

    @functools.cached_property
    def spec(self) -> OptionSpec:
        """Return what the field says of itself as an option."""
        if isinstance(self.field.json_schema_extra, dict):
            return self.field.json_schema_extra["option"]  # type: ignore[return-value]
        return next((entry for entry in self.metadata if isinstance(entry, OptionSpec)), OptionSpec())

    @property
    def flag(self) -> str:
        """Return the option as it is typed: ``--seq-len``."""
        return self.spec.name or "--" + self.name.replace("_", "-")

    @property
    def kind(self) -> Any:
        """Return the type of the value, of a list that of one: a class or a Literal."""
        kind = _without_none(self.field.annotation)
        return get_args(kind)[0] if get_origin(kind) is tuple else kind

    @property
    def choices(self) -> tuple[Any, ...]:
        """Return the values of a Literal; none of any other type."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def default(self) -> Any:
        """Return the default; that of a list is None."""
        if self.field.is_required():
            return inspect.Parameter.empty
        default = self.field.get_default(call_default_factory=True)
        return None if default == () else default

    @property
    def metavar(self) -> str | None:
        """Return what stands for the value in the help; None: its choices, or nothing of a flag."""
        return self.spec.metavar or _METAVARS.get(self.kind)

    @property
    def example(self) -> str:
        """Return the option with a value that sets it: ``--offload auto``, ``--nvme PATH``."""
        choice = next((choice for choice in self.choices if choice != self.default), None)
        return f"{self.flag} {choice or self.metavar or ''}".rstrip()

    def is_set(self, value: Any) -> bool:
        """Return whether a value is another than the default."""
        return value is not None and value != self.default

    def parameter(self, *, condition: str, is_conditional: bool) -> inspect.Parameter:
        """Return the parameter that typer reads the option from.

        Args:
            condition: beginning of the help that says when it applies.
            is_conditional: some modes do not take it, so that only others can demand it.
        """
        kind, default = self.kind, self.default
        text = condition + _sentence(self.text, self.choices, begins=not condition)
        if is_conditional and self.field.is_required():
            text, default = f"{text} Needed.", None
        bounds: dict[str, Any] = {"max": MAX_COUNT} if kind is int else {}
        for limit in self.metadata if kind in (int, float) else ():
            if isinstance(limit, Ge):
                bounds["min"] = limit.ge
            elif isinstance(limit, Gt) and kind is int:
                bounds["min"] = int(limit.gt) + 1  # type: ignore[call-overload]
            elif isinstance(limit, Le):
                bounds["max"] = limit.le
        parse = self.spec.parse or ({int: parse_count, float: parse_number}.get(kind))
        if parse is not None:
            bounds["parser"] = _parser(parse, self.flag, **bounds)
        if bounds.get("max", 0) >= MAX_COUNT:
            del bounds["max"]  # it keeps numbers computable, and says nothing to a user
        info = typer.Option(self.flag, metavar=self.metavar, help=text, autocompletion=self.spec.complete, **bounds)
        if get_origin(_without_none(self.field.annotation)) is tuple:
            kind = list[kind]  # type: ignore[valid-type]
        annotation = Annotated[kind | None if default is None else kind, info]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@dataclass(frozen=True)
class CommandOptions:
    """The option models of a command, by its parameters, and its modes."""

    models: Mapping[str, type[BaseModel]]
    modes: tuple[Mode, ...]

    @functools.cached_property
    def options(self) -> dict[str, Option]:
        """Return all options by the names of their fields."""
        return {option.name: option for model in self.models.values() for option in _options_of(model)}

    def parameters(self, model: type[BaseModel]) -> Iterator[inspect.Parameter]:
        """Yield the parameters that typer reads a model's options from, each with a help that says when it applies."""
        is_conditional = not all(model in mode.takes for mode in self.modes)
        for option in (option for option in self.options.values() if option.model is model):
            needed = [self.options[name] for name in option.spec.needs if name in self.options]
            modes = [
                mode for mode in self.modes if mode.takes_option(option) and not any(map(mode.takes_option, needed))
            ]
            words = [other.flag for other in needed] + [mode.name for mode in modes]
            is_said = all(words) and (needed or len(modes) < len(self.modes))
            condition = f"With {' or '.join(words)}: " if is_said else ""
            yield option.parameter(condition=condition, is_conditional=is_conditional)

    def require_meant(self, mode: Mode, values: Mapping[str, Any], typed: set[str]) -> None:
        """Refuse options that mean nothing in the mode or without another option, and a mode that lacks an option it needs.

        Raises:
            ConfigError: the options by name, why, and the fix.
        """
        applicable = {name: option for name, option in self.options.items() if mode.takes_option(option)}
        strange = [option for name, option in self.options.items() if name in typed and name not in applicable]
        if strange:
            raise self._refusal(mode, strange)
        for option in (option for name, option in applicable.items() if name in typed):
            needed = [applicable[name] for name in option.spec.needs if name in applicable]
            if needed and not any(other.is_set(values[other.name]) for other in needed):
                flags = " or ".join(other.flag for other in needed)
                raise ConfigError(f"{option.flag} without {flags}", help=f"add {needed[0].example}")
            for other in (applicable[name] for name in option.spec.barred_by if name in applicable):
                if other.is_set(values[other.name]):
                    raise ConfigError(f"{option.flag} means nothing with {other.flag}", help="leave one of them out")
        for option in applicable.values():
            if option.field.is_required() and values[option.name] is None:
                message = f"{mode.name} without {option.flag}" if mode.name else f"Missing option '{option.flag}'"
                raise ConfigError(message, help=(not mode.name and mode.fix) or f"add {option.example}")

    def _refusal(self, mode: Mode, strange: list[Option]) -> ConfigError:
        flags = [option.flag for option in strange]
        takers = [other.name for other in self.modes if all(map(other.takes_option, strange))]
        if not mode.name and takers and all(takers):
            return ConfigError(f"{', '.join(flags)} without {' or '.join(takers)}", help=f"add {takers[0]}")
        if not mode.name and len(strange) > 1:  # no mode has all of them
            return self._refusal(mode, strange[:1])
        why = f", which {mode.why}" if mode.why else ""
        return ConfigError(
            f"{', '.join(flags)} with {mode.name}{why}", help=mode.fix or f"leave out {' and '.join(flags)}"
        )

    def arguments(self, mode: Mode, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the command is called with: models in place of their fields, None for those the mode does not take."""
        arguments = {name: value for name, value in values.items() if name not in self.options}
        for parameter, model in self.models.items():
            names = [option.name for option in self.options.values() if option.model is model]
            fields = {name: values[name] for name in names if values[name] is not None}
            arguments[parameter] = model(**fields) if model in mode.takes else None
        return arguments


def command(*modes: Mode) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function with option models among its parameters a command of typer.

    Without modes every option applies always. Errors of ours end it with their message and exit code.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        kinds = {name: _without_none(hint) for name, hint in hints.items()}
        models = {name: kind for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, BaseModel)}
        options = CommandOptions(models, modes or (Mode(takes=tuple(models.values())),))
        parameters = [_CONTEXT]
        for name, parameter in inspect.signature(function).parameters.items():
            if name in models:
                parameters += options.parameters(models[name])
            elif name != _CONTEXT.name:
                parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(function)
        def run(context: typer.Context, **values: Any) -> None:
            sources = {name: context.get_parameter_source(name) for name in values}
            typed = {
                name for name, source in sources.items() if source and source.name in ("COMMANDLINE", "ENVIRONMENT")
            }
            with exit_on_error(as_json=bool(values.get("json") or values.get("as_json"))):
                mode = next(mode for mode in options.modes if mode.when(values))
                options.require_meant(mode, values, typed)
                given = {_CONTEXT.name: context} if _CONTEXT.name in hints else {}
                arguments = options.arguments(mode, values)
                with ExitStack() as stack:
                    for each in arguments.values():
                        if isinstance(each, OptionModel):
                            stack.enter_context(each.in_force())
                    function(**given, **arguments)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.command_options = options  # type: ignore[attr-defined]
        return run

    return decorate


def _options_of(model: type[BaseModel]) -> Iterator[Option]:
    """Yield the options of a model; fields that say nothing of themselves are those of the model it mirrors."""
    mirrored: type[BaseModel] = getattr(model, "mirrors", None) or model
    kinds = [kind for kind in reversed(mirrored.__mro__) if getattr(kind, "model_fields", None)]
    texts = {name: text for kind in kinds for name, text in field_texts(kind).items()}
    for name, field in model.model_fields.items():
        if field.description is None:
            field = mirrored.model_fields[name]
        made = Option(model, name, field, field.description or texts.get(name, ""))
        if made.spec.is_option:
            yield made


def _without_none(annotation: Any) -> Any:
    """Return an annotation without its metadata and without None."""
    if get_origin(annotation) is Annotated:
        return _without_none(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return _without_none(next(member for member in get_args(annotation) if member is not NoneType))
    return annotation


def _parser(parse: Callable[[str], Any], flag: str, **bounds: float) -> Callable[[Any], Any]:
    """Return what typer reads a number with: ``parse``, and the bounds of the field."""

    def read(text: Any) -> Any:
        try:
            value = parse(text) if isinstance(text, str) else text
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=flag) from None
        for name, holds in (("min", operator.ge), ("max", operator.le)):
            if name in bounds and not isinstance(value, str) and not holds(value, bounds[name]):
                word = "or more" if name == "min" else "or less"
                raise typer.BadParameter(f"{text}: must be {bounds[name]} {word}", param_hint=flag)
        return value

    return read


_UsageError = typer.BadParameter.__bases__[0]
"""Of the click that typer brings: what was typed is no command."""


class CommandGroup(TyperGroup):
    """Commands whose usage errors have the form of all others, on stdout too where --json was typed."""

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run a command and end the process with its exit code."""
        typed = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(args, **{**extra, "standalone_mode": False})
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
                sys.exit(error.exit_code)
            sys.exit(exit_with(_as_config_error(error), as_json="--json" in typed).exit_code)
        except typer.Abort:
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _as_config_error(error: Any) -> ConfigError:
    """Return a usage error of typer in our words, with the nearest name that there is."""
    context = error.ctx
    message = re.split(r" \(Possible options|\. Did you mean", error.format_message())[0].rstrip(".")
    message = re.sub(r"'(--[\w-]+)'", r"\1", message.replace("Value error, ", ""))
    names = list(getattr(error, "possibilities", None) or ())
    if message.startswith("No such command"):
        names = context.command.list_commands(context)
    near = difflib.get_close_matches(re.split(r"[ ']+", message.strip("'"))[-1], names, cutoff=0.7)
    path = context.command_path if context is not None else "meshwright"
    text = f"did you mean {' or '.join(near)}?" if near else f"{path} --help lists what there is"
    return ConfigError(message[:1].lower() + message[1:], help=text)


def _sentence(text: str, choices: tuple[Any, ...], *, begins: bool) -> str:
    """Return a text with a full stop, and where it begins the help with a capital, unless it begins with a value or a name."""
    text = text.replace("``", "`").strip()
    first = text.split(maxsplit=1)[0].rstrip(":,") if text else ""
    is_word = begins and first.replace("-", "").isalpha() and first not in choices
    return (text[0].upper() + text[1:] if is_word else text) + ("" if not text or text[-1] == "." else ".")


# Arguments and options that several commands share.


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A catalogue name (`meshwright models`), a config.json, a folder that holds one, or module:name of your own code.",
        autocompletion=complete_models,
    ),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json that `meshwright plan` wrote.")]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit-s", metavar="S", help="For all searches together.", min=0.1)
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table.")]


class ProfileOptions(OptionModel):
    """Measurements of the machines."""

    profile: tuple[Path, ...] = option((), "what `meshwright profile` measured of this machine.", metavar="FILE")
    allow_foreign_profile: bool = option(
        False, "use a profile of other hardware or software, or one that was edited.", needs=("profile",)
    )

    def profiled_clusters(self) -> list[ClusterSpec]:
        """Return the cluster of each profile. What is foreign about an allowed one is said on stderr.

        Raises:
            ProfileError: one is not of this machine.
        """
        from ..profilers.files import load_profile
        from ..profilers.profiled_cluster import profiled_cluster

        clusters = []
        for path in self.profile:
            profile, problems = load_profile(path, allow_foreign=self.allow_foreign_profile)
            for problem in problems:
                typer.echo(f"foreign profile {path}: {problem}", err=True)
            clusters.append(profiled_cluster(profile))
        return clusters

    def profiled_cluster(self) -> ClusterSpec | None:
        """Return the cluster of the profile; None without one.

        Raises:
            ConfigError: there are several.
            ProfileError: it is not of this machine.
        """
        if len(self.profile) > 1:
            raise ConfigError("several profiles describe kinds of device, and no cluster", help="add --cluster NAME")
        return next(iter(self.profiled_clusters()), None)

    def require_layers(self, cluster: ClusterSpec, model: ModelSpec, workload: Workload) -> None:
        """Require that what the profile says of the model's layers is of the plan's engine, unless it may be foreign.

        Raises:
            ProfileError: it is of other engines.
        """
        if self.allow_foreign_profile:
            return
        for profile in (cluster.profile, *(group.profile for group in cluster.groups)):
            if profile is not None and profile.layers:
                from ..profilers.files import require_layers_of_engine

                require_layers_of_engine(profile, model, workload)


def complete_solvers(incomplete: str) -> list[str]:
    """Return the solvers that begin so."""
    from ..solvers.solver_choice import PULP_NAMES

    return [name for name in PULP_NAMES if name.startswith(incomplete)]


class SolverOptions(OptionModel):
    """Who solves linear and integer programs, of which a search without offload has none."""

    solver: str = option(
        "highs", "solver of linear and integer programs: highs, cbc, scip, gurobi, cplex, xpress, mosek or another of PuLP.",
        metavar="NAME", complete=complete_solvers, needs=("offload",),
    )  # fmt: skip
    write_lp: Path | None = option(
        None, "write every linear or integer program there, as an .lp file.", metavar="FOLDER", needs=("offload",)
    )

    def in_force(self) -> AbstractContextManager[Any]:
        """Send programs to the solver; ConfigError where it is not installed."""
        if self.solver == "highs" and self.write_lp is None:
            return nullcontext()
        from ..solvers.solver_choice import linear_solver

        return linear_solver(self.solver, write_to=self.write_lp)
