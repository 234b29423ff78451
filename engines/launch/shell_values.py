"""Values of a shell script: characters that know where they stand, words made of them, arithmetic, and options."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile


@dataclass(frozen=True)
class Place:
    """A line of a file; 0: not of a file, or of all of it."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Piece:
    """Some characters of a value: where they stand, the variable that was given them, and whether they are known.

    Attributes:
        unknown: the variable that is not set, or the command whose output this would be; empty: the text is known.
        is_unset: it is such a variable, which is empty where a condition asks.
    """

    text: str
    place: Place
    variable: str = ""
    quoted: bool = False
    unknown: str = ""
    is_unset: bool = False


Value = tuple[Piece, ...]


@dataclass(frozen=True)
class Field:
    """A word that a command gets."""

    pieces: Value

    @property
    def text(self) -> str:
        """The characters; what is unknown as it is written."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def place(self) -> Place:
        """Where the first character stands."""
        return self._main.place

    @property
    def variable(self) -> str:
        """The variable that was given the word, where it is a variable's."""
        return self._main.variable

    @property
    def unknown(self) -> str:
        """The variable or command that is not known; empty: all is."""
        return next((piece.unknown for piece in self.pieces if piece.unknown), "")

    @property
    def _main(self) -> Piece:
        return next((piece for piece in self.pieces if piece.text), self.pieces[0])


_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def computed(text: str) -> int | None:
    """Return the value of an expression of whole numbers; None where it is no such expression."""
    try:
        return _value(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, KeyError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return _bounded(value)
        case ast.BinOp(left=left, op=op, right=right):
            return _bounded(_OPERATIONS[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return int(_OPERATIONS[type(op)](_value(left), _value(right)))
    raise ValueError


def _bounded(value: int) -> int:
    if abs(value) > 10**18:
        raise ValueError
    return value


def separate_by(words: list[Field], joint: str) -> Iterator[list[Field]]:
    """Yield the words between those that are ``joint``."""
    part: list[Field] = []
    for word in words:
        if word.text == joint:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def taken_apart(words: Sequence[Field]) -> Iterator[Field]:
    """Yield words; a string that a shell would read as a command is taken apart."""
    texts = [word.text for word in words]
    for idx, word in enumerate(words):
        before = texts[idx - 1] if idx else ""
        is_code = (before in ("-c", "-lc", "-ec") and {"bash", "sh"} & set(texts[:idx])) or texts[0] == "eval"
        if not is_code or not any(blank in word.text for blank in " \n\t"):
            yield word
            continue
        pieces: list[Piece] = []
        for piece in word.pieces:
            for text in re.split(r"(\s+)", piece.text) if not piece.unknown else [piece.text]:
                if text.isspace():
                    if pieces:
                        yield Field(tuple(pieces))
                    pieces = []
                elif text:
                    pieces.append(replace(piece, text=text.strip("'\"")))
        if pieces:
            yield Field(tuple(pieces))


_ENDS_VALUES = re.compile(r"--[A-Za-z]|\S+\.py$|\+{0,2}[A-Za-z_][\w.]*=")
"""What is no value of the option before it: another option, the program, an override of a recipe."""


def options_of(words: Iterable[Field]) -> Iterator[tuple[Field, str, list[Field]]]:
    """Yield (word of the option, its name, its values) of the options of a command: ``--name value ...`` and ``--name=value``."""
    pending = list(words)
    while pending:
        word = pending.pop(0)
        # An element of an array that was quoted as one: "--fp8-format hybrid".
        name, equals, value = word.text.partition("=")
        if not name.startswith("--") or len(name) < 3:
            continue
        if equals:
            last = word.pieces[-1]
            pieces = (
                tuple(p for p in word.pieces[1:]) if len(word.pieces) > 1 and word.pieces[0].text.endswith("=") else ()
            )
            yield word, name[2:], [Field(pieces or (replace(last, text=value),))]
            continue
        values = list(takewhile(lambda each: not _ENDS_VALUES.match(each.text), pending))
        del pending[: len(values)]
        yield word, name[2:], values


def separated(value: Value) -> list[Field]:
    """Return the words of a value, taken apart at blanks."""
    made: list[list[Piece]] = [[]]
    for piece in value:
        first, *others = re.split(r"\s+", piece.text)
        made[-1] += [replace(piece, text=first)] if first else []
        made += [[replace(piece, text=text)] if text else [] for text in others]
    return [Field(tuple(pieces)) for pieces in made if pieces]
