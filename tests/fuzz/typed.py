"""Documents in which every value is one that its type allows: drawn from the JSON schema that pydantic makes of a class.

Mutations of text mostly end at the first field that is none; these come further, where fields that are right by themselves do not
go together: zeros and the largest numbers that are allowed, other members of a union, parts of other documents of the same type.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from meshwright.schema.plan import Plan
from meshwright.schema.profile import Profile

Schema = dict[str, Any]
Place = tuple[Any, Any, Schema]
"""What holds a value, its key or index there, and its type."""

TEXTS = ("", "a", "0", "tp=2", "H100-SXM-80GB", "x" * 3000, "\u00e9\n", "../..", "=1+1")
MOST_CHANGES, DEEPEST = 3, 6


def schema_of(data: bytes) -> Schema:
    """Return the JSON schema of the plan or profile that a document is."""
    tree = json.loads(data)
    return (Plan.class_of(tree) if "estimate" in tree else Profile).model_json_schema()


def typed_mutated(data: bytes, schema: Schema, others: list[bytes], random: Random) -> bytes:
    """Return a document with one to three values replaced by others of their types."""
    tree = json.loads(data)
    for _ in range(random.randint(1, MOST_CHANGES)):
        places = list(_places(tree, schema, schema))
        holder, key, kind = random.choice(places)
        alike = [
            where[at]
            for where, at, other in _places(json.loads(random.choice(others)), schema, schema)
            if other == kind and where[at] != holder[key]
        ]
        holder[key] = random.choice(alike) if alike and random.random() < 0.4 else drawn(kind, schema, random)
    return json.dumps(tree).encode()


def _places(value: Any, kind: Schema, root: Schema) -> Iterator[Place]:
    """Yield every place below a value whose type is known."""
    kind = _member(value, kind, root)
    if isinstance(value, dict):
        named, other = kind.get("properties", {}), kind.get("additionalProperties")
        for key in value:
            if isinstance(inner := named.get(key, other), dict):
                yield value, key, inner
                yield from _places(value[key], inner, root)
    elif isinstance(value, list):
        firsts, rest = kind.get("prefixItems", []), kind.get("items")
        for idx, each in enumerate(value):
            if isinstance(inner := firsts[idx] if idx < len(firsts) else rest, dict):
                yield value, idx, inner
                yield from _places(each, inner, root)


def _resolved(kind: Schema, root: Schema) -> Schema:
    while "$ref" in kind:
        kind = root["$defs"][kind["$ref"].rpartition("/")[2]]
    return kind


def _member(value: Any, kind: Schema, root: Schema) -> Schema:
    """Return the member of a union that a value is of, as far as its fields tell."""
    kind = _resolved(kind, root)
    members = [_member(value, each, root) for each in kind.get("anyOf", kind.get("oneOf", ()))]
    if not members:
        return kind
    if isinstance(value, dict):
        return max(members, key=lambda each: len(value.keys() & each.get("properties", {}).keys()))
    return next((each for each in members if isinstance(value, list) == (each.get("type") == "array")), members[0])


def drawn(kind: Schema, root: Schema, random: Random, depth: int = 0) -> Any:
    """Return a value of a type."""
    kind = _resolved(kind, root)
    if members := kind.get("anyOf") or kind.get("oneOf"):
        return drawn(random.choice(members), root, random, depth)
    if "const" in kind or "enum" in kind:
        return random.choice(kind.get("enum", [kind.get("const")]))
    draw = {"object": _object, "array": _array, "integer": _number, "number": _number}.get(kind.get("type", ""))
    if draw is not None:
        return draw(kind, root, random, depth)
    values: dict[str, tuple[Any, ...]] = {"string": TEXTS, "boolean": (False, True), "null": (None,)}
    return random.choice(values.get(kind.get("type", ""), (None, 1, "a")))


def _object(kind: Schema, root: Schema, random: Random, depth: int) -> dict[str, Any]:
    needed, inner = kind.get("required", ()), kind.get("additionalProperties")
    made = {
        name: drawn(each, root, random, depth + 1)
        for name, each in kind.get("properties", {}).items()
        if name in needed or (depth < DEEPEST and random.random() < 0.5)
    }
    if isinstance(inner, dict):
        made |= {random.choice(TEXTS): drawn(inner, root, random, depth + 1) for _ in range(random.randint(0, 3))}
    return made


def _array(kind: Schema, root: Schema, random: Random, depth: int) -> list[Any]:
    made = [drawn(each, root, random, depth + 1) for each in kind.get("prefixItems", ())]
    inner = kind.get("items")
    if isinstance(inner, dict):
        least = kind.get("minItems", 0)
        most = min(kind.get("maxItems", least + 4), least + (4 if depth < DEEPEST else 0))
        made += [
            drawn(inner, root, random, depth + 1) for _ in range(random.randint(least, max(least, most)) - len(made))
        ]
    return made


def _number(kind: Schema, _root: Schema, random: Random, _depth: int) -> float:
    is_whole = kind["type"] == "integer"
    step = 1 if is_whole else 1e-9
    low = kind.get("minimum", kind.get("exclusiveMinimum", 0) + step if "exclusiveMinimum" in kind else -3)
    high = kind.get("maximum", kind.get("exclusiveMaximum", 2**62 + step) - step)
    near = [low, low + 1, 2, 3, 7, 8, 64, 100, 4096, 10**6, 2**31, 10**9, 2**40, high]
    number = random.choice([each for each in near if low <= each <= high] or [low])
    return int(number) if is_whole else number * random.choice((1, 1, 0.37, 1e-6)) if low <= 0 else number
