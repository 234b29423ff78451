"""Mutations of documents: of their trees where they parse (JSON, TOML, CSV, archives of arrays), else of their bytes.

Every choice comes from a `random.Random`, so that a seed repeats a document and Hypothesis can shrink one.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import re
import struct
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, 1, 2, 3, 7, 8, -1, 255, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**9, 10**9 + 1, 10**12, 10**18, 10**30,
    10**400, -(10**18), 0.0, -0.0, 0.1, 0.5, 1.5, 1e-9, 1e-300, 5e-324, 1e18, 1e300, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", " ", "self", "0", "-1", "1e9", "1e400", "nan", "inf", "0x10", "1_0", "9" * 30, "9" * 5000, "x" * 3000, "\0", "\ud800",
    "\ufeff", "\u00e9", "\u06f3", "\U0001d7d7", "../x", "/etc/passwd", "__class__", "{}", "[]",
    "%s%n", "a,b", 'a"b', "a\nb", "true", "null", "*",
)  # fmt: skip
TOKENS = (
    b"\0", b"\xff", b"\n", b"\r\n", b"\t", b",", b'"', b"'", b"[", b"]", b"{", b"}", b"(", b")", b":", b"=", b"#", b"&a ", b"*a",
    b"!!python/object/apply:os.mkdir [x]", b"--- ", b"<<: ", b"-", b"1e999", b"0xff", b"NaN", b"true", b"null", b"$(x)", b"${A}",
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How documents of a kind become a tree and bytes again; `parse` raises ValueError where one does not."""

    name: str
    parse: Callable[[bytes], Any]
    render: Callable[[Any], bytes]


def mutated(data: bytes, form: Form | None, others: list[bytes], random: Random) -> bytes:
    """The document with one to a few mutations; ``others`` are documents to take parts from."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        data = _once(data, form, others, random)
    return data


def _once(data: bytes, form: Form | None, others: list[bytes], random: Random) -> bytes:
    if form is not None and random.random() < 0.8:
        try:
            tree = form.parse(data)
            return form.render(_tree_mutated(tree, random))
        except Exception:  # no longer of its form after earlier mutations: bytes are changed instead
            pass
    return _bytes_mutated(data, others, random)


# --- trees --------------------------------------------------------------------------------------------------------


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting and len(found) < 5000:
        node = waiting.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            found.append((node, key))
            waiting.append(value)
    return found


def _tree_mutated(tree: Any, random: Random) -> Any:
    tree = copy.deepcopy(tree)
    places = _places(tree)
    if not places:
        return _value(random)
    container, key = random.choice(places)
    act = random.randrange(11)
    if act >= 9 and isinstance(container[key], int | float | str):
        _replace_alike(places, container[key], _near(container[key], random))
    elif act <= 2:
        container[key] = _near(container[key], random)
    elif act == 3:
        container[key] = _value(random)
    elif act == 4:
        del container[key]
    elif act == 5:
        other, name = random.choice(places)
        container[key] = copy.deepcopy(other[name])
    elif act == 6 and isinstance(container, dict):
        container[random.choice((*TEXTS, *container))] = container.pop(key)
    elif act == 7 and isinstance(container, list):
        container[key:key] = copy.deepcopy(container[key : key + random.choice((1, 1, 2, 40))])
    else:
        container[key] = _nested(container[key], random)
    return tree


def _replace_alike(places: list[tuple[Any, Any]], value: Any, other: Any) -> None:
    """Replace a value wherever the tree has it, as a document that is consistent would."""
    for container, key in places:
        if type(container[key]) is type(value) and container[key] == value:
            container[key] = other


def text_replaced(data: bytes, form: Form, text: str, random: Random) -> bytes:
    """The document with one of its texts, or the name of one of its entries, replaced; as it is where it has none."""
    tree = form.parse(data)
    texts = [(container, key) for container, key in _places(tree) if isinstance(container[key], str)]
    if not texts:
        return data
    container, key = random.choice(texts)
    container[key] = text
    return form.render(tree)


def _near(value: Any, random: Random) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        changed = (value + 1, value - 1, -value, value * 2, value // 2 if value == value and abs(value) < 1e308 else 0)
        return random.choice((*NUMBERS, *changed))
    if isinstance(value, bytes):
        return _bytes_mutated(value, [], random)
    if isinstance(value, str):
        return random.choice((*TEXTS, value * 2, value[: len(value) // 2], str(random.choice(NUMBERS[:24]))))
    return _value(random)


def _value(random: Random) -> Any:
    return random.choice((None, True, False, [], {}, [[]], {"self": 1}, random.choice(NUMBERS), random.choice(TEXTS)))


def _nested(value: Any, random: Random) -> Any:
    for _ in range(random.choice((1, 2, 50, 300))):
        value = [value]
    return value


# --- bytes --------------------------------------------------------------------------------------------------------


def _bytes_mutated(data: bytes, others: list[bytes], random: Random) -> bytes:
    at, end = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
    end = min(end, at + random.choice((1, 4, 64, len(data))))
    act = random.randrange(8)
    if act == 0:
        return data[:at] + data[end:]
    if act == 1:
        return data[:at]
    if act == 2:
        return data[:end] + data[at:end] * random.choice((1, 1, 2, 50)) + data[end:]
    if act == 3:
        return data[:at] + random.choice(TOKENS) * random.choice((1, 1, 2, 2000)) + data[at:]
    if act == 4 and at < len(data):
        return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]
    if act == 5 and others:
        other = random.choice(others)
        cut = random.randrange(len(other) + 1)
        return data[:at] + other[cut : cut + random.choice((8, 64, len(other)))] + data[end:]
    if act == 6:
        return data[:at] + struct.pack("<q", random.choice((0, -1, 1, 2**31, 2**62))) + data[at + 8 :]
    return _number_replaced(data, random)


def _number_replaced(data: bytes, random: Random) -> bytes:
    """A run of digits replaced by another number."""
    runs = list(re.finditer(rb"\d+", data[:100_000]))
    if not runs:
        return data
    run = random.choice(runs)
    return data[: run.start()] + str(random.choice(NUMBERS)).encode() + data[run.end() :]


# --- forms --------------------------------------------------------------------------------------------------------


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _lines(tree: Any) -> bytes:
    return b"\n".join(_json(entry) for entry in tree)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**300:
        return hex(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value.encode("utf-8", "replace").decode())
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_toml_value(str(k))} = {_toml_value(v)}' for k, v in value.items())} }}"
    return '"null"'


def _toml(tree: Any) -> bytes:
    """TOML with inline tables only."""
    return "\n".join(f"{_toml_value(str(key))} = {_toml_value(value)}" for key, value in tree.items()).encode()


def _cells(data: bytes) -> Any:
    try:
        return list(csv.reader(io.StringIO(data.decode())))
    except csv.Error as error:
        raise ValueError(str(error)) from None


def _csv(tree: Any) -> bytes:
    out = io.StringIO()
    rows = (row if isinstance(row, list) else [row] for row in tree)
    csv.writer(out, lineterminator="\n").writerows([str(cell)[:6000] for cell in row] for row in rows)
    return out.getvalue().encode("utf-8", "replace")


def _members(data: bytes) -> Any:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from None


def _zip(tree: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in tree.items():
            archive.writestr(str(name)[:50] or "x", content if isinstance(content, bytes) else _json(content))
    return out.getvalue()


def _header(data: bytes) -> Any:
    """safetensors: the JSON header and the bytes after it."""
    size = int.from_bytes(data[:8], "little")
    return [json.loads(data[8 : 8 + size]), data[8 + size :]]


def _safetensors(tree: Any) -> bytes:
    header = _json(tree[0])
    return struct.pack("<Q", len(header)) + header + (tree[1] if isinstance(tree[1], bytes) else b"")


JSON = Form("json", lambda data: json.loads(data), _json)
JSON_LINES = Form("jsonl", lambda data: [json.loads(line) for line in data.splitlines() if line.strip()], _lines)
TOML = Form("toml", lambda data: tomllib.loads(data.decode()), _toml)
CSV = Form("csv", _cells, _csv)
ZIP = Form("zip", _members, _zip)
SAFETENSORS = Form("safetensors", _header, _safetensors)
