"""docs/reference/documents.md: the fields of plan.json and of everything in it, read off the classes of schema/."""

from __future__ import annotations

import inspect
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt, MaxLen, MinLen
from markdown import code, plain, table
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Offer, Profile, RlPlan, TrainingPlan, Workload
from meshwright.schema.base import field_texts
from meshwright.schema.generation import GenerationPlan
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOTS = (Layout, Workload, TrainingPlan, ModelSpec, ClusterSpec, Offer, Profile, GenerationPlan, RlPlan)

MOST = (10**9, 2**62, 1e60)
"""Upper limits of every count that a user states, and of every number (schema/base.py); not worth a mention."""

INTRO = """# Documents

What stands in plan.json, profile.json and a cluster, class by class (`schema/`). The fields of Layout are those of `--fix` and
`--layout`. Files of an older version load: fields that came later have defaults. A field that is unknown, or a number outside
its limits, is refused with exit code 2. How to write a cluster by hand: [cluster.md](../cluster.md).

Units are in the names: `_s` seconds, `_bytes`, `_flops`, `_ratio`; counts begin with `num_`."""


def page() -> str:
    """The roots first, then what they are made of."""
    kinds = _reachable()
    lines = [
        INTRO,
        "",
        " ".join(_link(kind) for kind in sorted(kinds, key=_title)),
    ]
    for kind in kinds:
        lines += ["", *_section(kind)]
    return "\n".join(lines)


def _reachable() -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = list(ROOTS)
    for kind in found:
        inner = [part for field in kind.model_fields.values() for part in _models_in(field.annotation)]
        found += dict.fromkeys(part for part in inner if part not in found)
    return found


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in _models_in(part)]


def _title(kind: type[BaseModel]) -> str:
    """The class's name; of two of one name those outside plan.py say which file they are of."""
    file = kind.__module__.rpartition(".")[2]
    return kind.__name__ if (kind.__name__, file) != ("Provenance", "profile") else f"{kind.__name__} of a {file}"


def _link(kind: type[BaseModel]) -> str:
    return f"[{_title(kind)}](#{_title(kind).lower().replace(' ', '-')})"


def _section(kind: type[BaseModel]) -> list[str]:
    about, meanings = _docstring(kind)
    rows = [
        [code(name), _type(field.annotation, field.metadata), _default(field), meanings.get(name, "")]
        for name, field in kind.model_fields.items()
    ]
    return [f"## {_title(kind)}", "", *about, "", *table(["field", "type", "default", "meaning"], rows)]


def _docstring(kind: type[BaseModel]) -> tuple[list[str], dict[str, str]]:
    """Return the paragraphs above "Attributes:", and what stands below it for each field."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[0]
    paragraphs = [plain(part) for part in text.split("\n\n") if not part.startswith("Raises:")]
    return "\n\n".join(paragraphs).split("\n"), {name: plain(meaning) for name, meaning in field_texts(kind).items()}


def _type(annotation: Any, metadata: Any = ()) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0], parts[1:])
    if origin is Literal:
        return ", ".join(code(repr(part) if isinstance(part, str) else str(part)) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _type(part, metadata) for part in parts)
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list of {_type(parts[0])}"
    if origin is tuple:
        return "[" + ", ".join(_type(part) for part in parts) + "]"
    if origin is not None:
        return f"{origin.__name__} of " + " to ".join(_type(part) for part in parts)
    if issubclass(annotation, BaseModel):
        return _link(annotation)
    return " ".join([annotation.__name__, *_limits(metadata)])


def _limits(metadata: Any) -> list[str]:
    found = []
    for limit in metadata:
        inner = getattr(limit, "metadata", [limit])  # a FieldInfo holds its limits
        for one in inner:
            found += [
                f"{sign} {getattr(one, name)}"
                for kind, name, sign in ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))
                if isinstance(one, kind | Interval) and getattr(one, name) not in (None, *MOST)
            ]
            if isinstance(one, MinLen | MaxLen):
                found.append("not empty" if isinstance(one, MinLen) else f"of at most {one.max_length}")
    return found


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "depends"
    if field.default is PydanticUndefined:
        return "needed"
    return "null" if field.default is None else code(_shown(field.default))


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "all defaults"
    return "[]" if value == () else repr(value)
