"""What a launch script would start, worked out without running anything: variables, arrays and conditions are followed.

The script sees an empty environment, what `#SBATCH` lines make Slurm set, and what the user gives (`--set NNODES=8`), which also
wins over the script's own assignments. A command's output (`$(...)`) is unknown: it stands as it is written. A condition that
depends on it, or on a file, does not hold; `Script.undecided` says which. A loop's body is followed once, with its first word.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...schema.base import is_file, read_text
from ...schema.errors import ConfigError
from . import shell_tree as syntax
from .shell_syntax import parse_script
from .shell_tree import Literal, Word, plain_text
from .shell_values import Field, Piece, Place, Value, computed, separate_by, separated, taken_apart

MAX_TEXT = 2_000_000
"""Characters of all values together: a script may double a variable in every line."""
PIECE_COST = 100
"""What a piece counts for besides its text, in characters: values of many short pieces are as dear as long ones."""
MAX_DEPTH = 40
"""Functions and sourced files within one another."""
MAX_FOLLOWED = 20_000
"""Commands that are followed, again for each call of a function or file that they are in."""
MAX_CUT = 4096
"""Characters of a value of which a pattern takes the beginning or end off: it is tried with every length."""


@dataclass(frozen=True)
class Started:
    """A command that the script starts."""

    words: tuple[Field, ...]
    place: Place


@dataclass
class Script:
    """What was found.

    Attributes:
        commands: in order; those in a string after ``bash -c`` or ``eval`` are taken apart.
        files: text of files that it writes (``cat > FILE <<EOF``), by the name as it is written.
        variables: at the end.
        undecided: conditions that were taken as not met, and files that it reads and that are not here.
        slurm: what ``#SBATCH`` says: nodes, devices and tasks of a node.
        used: variables of the user's that the script reads or sets.
    """

    commands: list[Started] = field(default_factory=list)
    files: dict[str, tuple[str, Place]] = field(default_factory=dict)
    variables: dict[str, list[Value]] = field(default_factory=dict)
    undecided: list[str] = field(default_factory=list)
    slurm: dict[str, tuple[int, Place]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


def read_script(text: str, file: Path, given: Mapping[str, str] | None = None) -> Script:
    """Follow a script.

    Args:
        file: where it is, for places and for what it sources from its own folder.
        given: values of variables that win over the script's.

    Raises:
        ConfigError: it is not a script, or its values grow beyond all measure.
    """
    reader = _Reader(file, dict(given or {}))
    reader.slurm(text)
    try:
        reader.follow(parse_script(text))
    except RecursionError:
        raise ConfigError("not a shell script: it is nested too deeply") from None
    return reader.script


_SLURM = re.compile(r"^#SBATCH\s+(?:--)?(-N|nodes|gpus-per-node|ntasks-per-node|gres)[=\s]+(\S+)", re.MULTILINE)
_SLURM_VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}
_SILENT = frozenset(
    {"echo", "printf", "mkdir", "cd", "rm", "cp", "ls", "which", "exit", "return", "tee", "kill", "cat"}
)
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


class _Reader:
    def __init__(self, file: Path, given: dict[str, str]) -> None:
        self.file, self.name, self.script = file, file.name, Script()
        self.given = given
        self.functions: dict[str, list[syntax.Command]] = {}
        self.sourced: dict[Path, list[syntax.Command]] = {}
        self.depth, self.size, self.followed = 0, 0, 0
        for name, text in given.items():
            self.script.variables[name] = [(Piece(text, Place("--set", 0), name),)]

    def slurm(self, text: str) -> None:
        """Take what Slurm would set from the lines for it."""
        for match in _SLURM.finditer(text):
            what = {"-N": "nodes", "gres": "gpus-per-node"}.get(match[1], match[1])
            digits = re.search("([0-9]{1,18})$", match[2])
            if not digits or (match[1] == "gres" and not match[2].startswith("gpu")):
                continue
            place = Place(self.name, text.count("\n", 0, match.start()) + 1)
            self.script.slurm[what] = int(digits[1]), place
            for name in _SLURM_VARIABLES[what]:
                if name not in self.given:
                    self.script.variables[name] = [(Piece(digits[1], place, name),)]

    def place(self, line: int) -> Place:
        return Place(self.name, line)

    # --- commands ---

    def follow(self, commands: Iterable[syntax.Command]) -> bool | None:
        """Follow commands; whether the last one succeeds, None where that is not known."""
        result: bool | None = True
        for command in commands:
            result = self.one(command)
        return result

    def one(self, command: syntax.Command) -> bool | None:
        """Follow a command; None: whether it succeeds is not known."""
        self.followed += 1
        if self.followed > MAX_FOLLOWED:
            raise ConfigError(f"not a launch script: it comes to more than {MAX_FOLLOWED} commands")
        match command:
            case syntax.Simple():
                return self.simple(command)
            case syntax.Test():
                return self.test(command)
            case syntax.Chain():
                return self.chain(command)
            case syntax.Group():
                return self.follow(command.body)
            case syntax.Function():
                self.functions[command.name] = command.body
                return True
            case syntax.Conditional():
                self.conditional(command)
            case syntax.Case():
                self.case(command)
            case syntax.Loop():
                self.loop(command)
        return True

    def chain(self, chain: syntax.Chain) -> bool | None:
        result: bool | None = None
        for joint, command in chain.items:
            if joint in ("&&", "||") and (result is None or result == (joint == "||")):
                continue
            result = self.one(command)
            is_test = (
                isinstance(command, syntax.Simple) and command.words and plain_text(command.words[0]) in ("[", "test")
            )
            if result is None and isinstance(command, syntax.Simple) and not is_test:
                result = True  # what it starts is taken to succeed
            if joint == "!" and result is not None:
                result = not result
        return result

    def conditional(self, command: syntax.Conditional) -> None:
        for condition, body in command.branches:
            holds = self.follow(condition)
            if holds is None:
                self.script.undecided.append(f"{self.place(command.line)}: this condition is taken as not met")
            if holds:
                self.follow(body)
                return

    def case(self, command: syntax.Case) -> None:
        value = self.scalar(command.word)
        text = "".join("" if piece.is_unset else piece.text for piece in value)
        for patterns, body in command.branches:
            if any(fnmatch.fnmatchcase(text, Field(self.scalar(p) or self.nothing).text) for p in patterns):
                self.follow(body)
                return

    def loop(self, command: syntax.Loop) -> None:
        if not command.name:
            if command.condition and self.follow(command.condition) is (not command.is_until):
                self.follow(command.body)
            return
        words = [f for word in command.words for f in self.fields(word)]
        if len(words) > 1:
            self.script.undecided.append(f"{self.place(command.line)}: of this loop only the first round is read")
        if words:
            self.assign(command.name, [words[0].pieces])
            self.follow(command.body)

    def simple(self, command: syntax.Simple) -> bool | None:
        for each in command.assignments:
            self.assignment(each)
        words = [f for word in command.words for f in self.fields(word)]
        here = self.scalar(command.here) if command.here is not None else ()
        if command.output is not None:
            target = Field(self.scalar(command.output) or self.nothing).text
            text = (
                Field(here).text
                if here
                else " ".join(f.text for f in words[1:])
                if words and words[0].text == "echo"
                else ""
            )
            if text:
                self.script.files[target] = text, (here or words[1].pieces)[0].place
        if not words:
            return True
        name = words[0].text
        if name in ("[", "test"):
            return self.decide([f for f in words[1:] if f.text != "]" or f.pieces[0].quoted])
        if name in ("source", "."):
            self.source(words[1:], command.line)
        elif name in self.functions:
            self.call(name, words[1:])
        elif name in ("true", ":"):
            return True
        elif name == "false":
            return False
        elif name not in _SILENT:
            self.script.commands.append(Started(tuple(taken_apart(words)), self.place(command.line)))
        return None

    def call(self, name: str, words: Sequence[Field]) -> None:
        with_positional = {str(idx): [word.pieces] for idx, word in enumerate(words, 1)}
        before = {key: self.script.variables.get(key) for key in [*map(str, range(1, 10)), "@"]}
        for key in before:
            self.script.variables.pop(key, None)
        self.script.variables |= with_positional | {"@": [word.pieces for word in words]}
        self.deeper(lambda: self.follow(self.functions[name]))
        for key, value in before.items():
            self.script.variables.pop(key, None)
            if value is not None:
                self.script.variables[key] = value

    def deeper(self, follow: Callable[[], object]) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ConfigError("not a shell script: functions or files call each other without end")
        follow()
        self.depth -= 1

    def source(self, words: Sequence[Field], line: int) -> None:
        if not words:
            return
        path = self.file.parent / words[0].text
        if words[0].unknown or not is_file(path):
            self.script.undecided.append(f"{self.place(line)}: reads {words[0].text[:200]}, which is not here")
            return
        outer = self.name
        self.name = path.name
        if path not in self.sourced:
            self.sourced[path] = parse_script(read_text(path))
        self.deeper(lambda: self.follow(self.sourced[path]))
        self.name = outer

    # --- conditions ---

    def test(self, test: syntax.Test) -> bool | None:
        if test.arithmetic:
            value = self.arithmetic(test.arithmetic, self.place(test.line))
            return None if value.unknown else value.text != "0"
        fields = [Field(self.scalar(word) or self.nothing) for word in test.words]
        return self.decide(fields)

    def decide(self, words: list[Field]) -> bool | None:
        """Return whether a test holds; || binds loosest."""
        for joint, combine in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
            if any(word.text == joint for word in words):
                parts = [self.decide(part) for part in separate_by(words, joint)]
                decided = [part for part in parts if part is not None]
                if combine(decided) == (combine is any) and decided and (combine is any or len(decided) == len(parts)):
                    return combine is any or True
                return None if len(decided) < len(parts) and (combine is any or all(decided)) else combine(decided)
        words = [word for word in words if word.text not in ("(", ")")]
        if words and words[0].text == "!":
            inner = self.decide(words[1:])
            return None if inner is None else not inner
        if any(piece.unknown and not piece.is_unset for word in words for piece in word.pieces):
            return None
        texts = ["".join("" if piece.is_unset else piece.text for piece in word.pieces) for word in words]
        if len(texts) == 1:
            return bool(texts[0])
        if len(texts) == 2 and texts[0] in ("-z", "-n", "-v"):
            is_set = texts[1] in self.script.variables if texts[0] == "-v" else bool(texts[1])
            return is_set != (texts[0] == "-z")
        if len(texts) == 3 and texts[1] in ("=", "==", "!="):
            pattern = texts[2] if not any(piece.quoted for piece in words[2].pieces) else re.escape(texts[2])
            same = texts[0] == texts[2] or fnmatch.fnmatchcase(texts[0], pattern)
            return same == (texts[1] != "!=")
        if len(texts) == 3 and (compare := _COMPARISONS.get(texts[1])):
            try:
                return compare(int(texts[0] or 0), int(texts[2] or 0))
            except ValueError:
                return None
        return None

    # --- values ---

    @property
    def nothing(self) -> Value:
        return (Piece("", self.place(0)),)

    def assign(self, name: str, values: list[Value]) -> None:
        if name in self.given:
            self.script.used.add(name)
            return
        # A piece of one character costs as much as a line of text.
        self.size += sum(len(piece.text) + PIECE_COST for value in values for piece in value)
        if self.size > MAX_TEXT:
            raise ConfigError("not a launch script: its variables grow without end")
        named = [
            tuple(replace(piece, variable=piece.variable or name, quoted=False) for piece in value) for value in values
        ]
        self.script.variables[name] = named

    def assignment(self, each: syntax.Assignment) -> None:
        before = self.script.variables.get(each.name, []) if each.appends else []
        if each.is_array:
            words: Iterable[Word] = each.value  # type: ignore[assignment]
            values = [field.pieces for word in words for field in self.fields(word)]
            self.assign(each.name, [*before, *values])
        else:
            value = self.scalar(each.value)  # type: ignore[arg-type]
            # A variable that grows from nothing: ARGS="$ARGS --more".
            value = tuple(piece for piece in value if not (piece.is_unset and piece.unknown == f"${each.name}"))
            self.assign(each.name, [(before[0] if before else ()) + (value or self.nothing), *before[1:]])

    def scalar(self, word: Word) -> Value:
        """Return what a word stands for, without taking it apart at blanks."""
        return tuple(piece for part in word for idx, value in enumerate(self.part(part))
                     for piece in ((Piece(" ", value[0].place),) if idx and value else ()) + value)  # fmt: skip

    def fields(self, word: Word) -> list[Field]:
        """Return the words that a command gets for one of the script: none, one or many."""
        made: list[list[Piece]] = [[]]
        for part in word:
            quoted, values = part.quoted, self.part(part)
            if not values and len(word) <= 2:  # "$@" of nothing is no word, not an empty one
                return []
            for idx, value in enumerate(values):
                if idx:
                    made.append([])
                for piece in value:
                    if quoted or isinstance(part, Literal):
                        made[-1].append(replace(piece, quoted=quoted))
                    else:
                        first, *others = re.split(r"\s+", piece.text) if not piece.unknown else [piece.text]
                        made[-1] += [replace(piece, text=first, quoted=False)] if first else []
                        made += [[replace(piece, text=text, quoted=False)] if text else [] for text in others]
        return [Field(tuple(pieces)) for pieces in made if pieces and (any(p.text or p.quoted for p in pieces))]

    def part(self, part: syntax.Part) -> list[Value]:
        """Return the values of a part: one, or those of an array."""
        place = self.place(part.line)
        if isinstance(part, Literal):
            return [(Piece(part.text, place, quoted=part.quoted),)]
        if isinstance(part, syntax.Computed):
            if part.is_arithmetic:
                return [(self.arithmetic(part.text, place),)]
            shown = f"$({' '.join(part.text.split())})"
            return [(Piece(shown, place, unknown=shown),)]
        return self.variable(part, place)

    def variable(self, part: syntax.Variable, place: Place) -> list[Value]:
        name, kind = part.name, part.operator.removeprefix(":")
        if name.startswith("#"):
            count = len(self.script.variables.get(name[1:], [])) if len(name) > 1 else 0
            return [(Piece(str(count), place),)]
        if name in self.given:
            self.script.used.add(name)
        values = self.script.variables.get(name)
        if values is not None and part.index not in ("@", "*") and name != "@":
            index = int(part.index) if re.fullmatch("[0-9]{1,18}", part.index) else 0
            values = values[index : index + 1]
        is_set = values is not None and (not part.operator.startswith(":") or any(p.text for v in values for p in v))
        if kind in ("-", "=", "?") and not is_set:
            if kind != "?":
                default = self.scalar(part.argument)
                if kind == "=":
                    self.assign(name, [default or ((Piece("", place),))])
                return [default]
        elif kind == "+":
            return [self.scalar(part.argument)] if is_set else []
        elif values is not None and kind in ("", "-", "=", "?"):
            return values
        elif values and len(values) == 1 and (changed := _changed(Field(values[0] or self.nothing), part, self)):
            return [changed]
        if name in ("@", "*") or (name.isdigit() and values is None and kind == "" and self.depth):
            return []
        shown = f"${name}"
        return [(Piece(shown, place, unknown=shown, is_unset=values is None),)]

    def arithmetic(self, text: str, place: Place) -> Piece:
        """Return the value of an arithmetic expression."""
        texts, names = [], re.compile(r"\$\{?([A-Za-z_]\w*|[0-9])(?::?-([^}]*))?\}?|([A-Za-z_]\w*)|(.)", re.DOTALL)
        for match in names.finditer(text):
            name = match[1] or match[3]
            value = self.script.variables.get(name) if name else None
            texts.append(match[4] or (Field(value[0]).text if value and value[0] else match[2] or name))
        result = computed("".join(texts))
        if result is None:
            shown = f"$(({' '.join(text.split())}))"
            return Piece(shown, place, unknown=shown)
        return Piece(str(result), place)


def _changed(value: Field, part: syntax.Variable, reader: _Reader) -> Value | None:
    """Return a value with the beginning or end taken off that a pattern names, or in other letters."""
    text, pattern = value.text, Field(reader.scalar(part.argument) or reader.nothing).text
    if value.unknown or len(text) > MAX_CUT:
        return None
    if part.operator in (",,", "^^"):
        text = text.lower() if part.operator == ",," else text.upper()
    elif part.operator in ("#", "##", "%", "%%"):
        lengths: Iterable[int] = range(len(text) + 1)
        lengths = lengths if len(part.operator) == 1 else reversed(range(len(text) + 1))
        cuts = (text[:n] if part.operator[0] == "#" else text[len(text) - n :] for n in lengths)
        cut = next((cut for cut in cuts if fnmatch.fnmatchcase(cut, pattern)), "")
        text = text[len(cut) :] if part.operator[0] == "#" else text[: len(text) - len(cut)]
    else:
        return None
    return (replace(value.pieces[0], text=text),)


def assigned_words(script: Script) -> list[Field]:
    """Return the words of all variables of a script: what it would have for options, where it starts nothing itself."""
    return [word for values in script.variables.values() for value in values for word in separated(value)]
