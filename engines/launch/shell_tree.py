"""The nodes of a shell script's tree: words with what is put into them, and commands."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Literal:
    """Characters as they are; a piece holds no more than one line, whose number it knows."""

    text: str
    line: int
    quoted: bool = False


@dataclass(frozen=True)
class Variable:
    """``$NAME``, ``${NAME[index]operator argument}``; ``#NAME`` is a length."""

    name: str
    line: int
    quoted: bool
    index: str = ""
    operator: str = ""
    argument: Word = ()


@dataclass(frozen=True)
class Computed:
    """``$((...))`` (arithmetic) or ``$(...)`` and backquotes, whose text is kept."""

    text: str
    line: int
    quoted: bool
    is_arithmetic: bool


Part = Literal | Variable | Computed
Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """``name=value``, ``name+=value``, ``name=(values)``."""

    name: str
    value: Word | tuple[Word, ...]
    is_array: bool
    appends: bool


@dataclass
class Simple:
    """A command with its words, what it assigns, and where its output goes."""

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    here: Word | None = None
    output: Word | None = None


@dataclass
class Test:
    """``[[ words ]]`` or ``(( text ))``."""

    line: int
    words: list[Word]
    arithmetic: str = ""


@dataclass
class Chain:
    """Commands joined by ``&&`` or ``||``; the joint before each, empty before the first."""

    items: list[tuple[str, Command]]


@dataclass
class Conditional:
    """Branches of an `if`, each a condition with its body; the last condition may be empty (`else`)."""

    line: int
    branches: list[tuple[list[Command], list[Command]]]


@dataclass
class Case:
    """``case word in pattern|pattern) body;; esac``."""

    line: int
    word: Word
    branches: list[tuple[list[Word], list[Command]]]


@dataclass
class Loop:
    """`for` over words, or `while` and `until` (no name)."""

    line: int
    name: str
    words: list[Word]
    condition: list[Command]
    body: list[Command]
    is_until: bool = False


@dataclass
class Function:
    """A function by its name."""

    name: str
    body: list[Command]


@dataclass
class Group:
    """``{ ... }`` or ``( ... )``."""

    body: list[Command]


Command = Simple | Test | Chain | Conditional | Case | Loop | Function | Group


def plain_text(word: Word) -> str:
    """Return the literal text of a word, what is computed left out."""
    return "".join(part.text for part in word if isinstance(part, Literal))
