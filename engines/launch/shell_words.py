"""Read the words of a shell script: quotes, variables, computed parts, here-documents."""

from __future__ import annotations

import re

from ...schema.errors import ConfigError
from .shell_tree import Computed, Literal, Part, Simple, Variable, Word

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
BLANK, ENDS = " \t\r", "\n;&|()"


class WordReader:
    """A place in a text, and what is read from there on.

    Attributes:
        pending: here-documents whose text begins on the next line: command, delimiter, whether that is quoted, and whether tabs
            are stripped.
    """

    def __init__(self, text: str, line: int = 1) -> None:
        """Begin at the first character, in a line of that number."""
        self.text, self.pos, self.line = text, 0, line
        self.pending: list[tuple[Simple, str, bool, bool]] = []

    def peek(self, count: int = 1) -> str:
        """Return the next characters."""
        return self.text[self.pos : self.pos + count]

    def take(self, count: int = 1) -> str:
        """Return the next characters and go on after them."""
        taken = self.text[self.pos : self.pos + count]
        self.pos, self.line = self.pos + count, self.line + taken.count("\n")
        return taken

    def blanks(self) -> None:
        """Go past blanks and ends of lines that are continued."""
        while self.pos < len(self.text):
            if self.peek() in BLANK:
                self.take()
            elif self.peek(2) == "\\\n":
                self.take(2)
            else:
                return

    def comment(self) -> None:
        """Go to the end of the line."""
        end = self.text.find("\n", self.pos)
        self.pos = len(self.text) if end < 0 else end

    def newline(self) -> None:
        """Go to the next line, past here-documents that begin there."""
        self.take()
        for command, delimiter, quoted, stripped in self.pending:
            command.here = self._here_document(delimiter, quoted, stripped)
        self.pending = []

    def gaps(self) -> None:
        """Go to the next word of a list of commands or of an array."""
        while self.pos < len(self.text):
            self.blanks()
            if self.peek() == "#":
                self.comment()
            elif self.peek() == "\n":
                self.newline()
            elif self.peek() in (";", "&") and self.peek(2) != ";;":
                self.take()
            else:
                return

    def keyword(self, *names: str) -> str:
        """Return the keyword that stands here, one of ``names``; empty: none does."""
        match = re.compile(r"[a-z]+|[{}]|\[\[").match(self.text, self.pos)
        if not match or match[0] not in names:
            return ""
        after = self.text[match.end() : match.end() + 1]
        return match[0] if not after or after in BLANK + ENDS else ""

    def expect(self, name: str, line: int) -> None:
        """Go past a word that must stand here."""
        self.gaps()
        if self.peek(len(name)) != name:
            raise ConfigError(f"line {line}: what begins here has no {name!r}")
        self.take(len(name))

    def _here_document(self, delimiter: str, quoted: bool, stripped: bool) -> Word:
        lines, first = [], self.line
        while self.pos < len(self.text):
            end = self.text.find("\n", self.pos)
            content = self.take((len(self.text) if end < 0 else end + 1) - self.pos)
            content = content.lstrip("\t") if stripped else content
            if content.rstrip("\r\n") == delimiter:
                break
            lines.append(content)
        if quoted:
            return tuple(Literal(content, first + idx, quoted=True) for idx, content in enumerate(lines))
        inner = WordReader("".join(lines), first)
        return tuple(inner.quoted_parts(""))

    def word(self, end: str = "") -> Word:
        """Read a word up to a blank or an operator, or within braces up to ``end``."""
        parts: list[Part] = []
        while self.pos < len(self.text):
            char = self.peek()
            if end and char == end:
                break
            if not end and char in BLANK + "\n;&|()<>":
                break
            if char == "'":
                parts += self._single_quoted()
            elif char == '"':
                self.take()
                parts += [Literal("", self.line, quoted=True), *self.quoted_parts('"')]
            elif char == "\\":
                self.take()
                line = self.line
                taken = self.take()
                parts += [] if taken == "\n" else [Literal(taken, line, quoted=True)]
            elif char == "$" and self.peek(2) == "$'":
                self.take()
                parts += self._single_quoted()
            elif char in "$`":
                parts.append(self.expansion(quoted=False))
            else:
                start, line = self.pos, self.line
                while self.pos < len(self.text) and self.peek() not in BLANK + "\n;&|()<>'\"\\$`" + end:
                    self.pos += 1
                if self.pos == start:
                    self.take()
                parts.append(Literal(self.text[start : self.pos], line))
        return tuple(parts)

    def _single_quoted(self) -> list[Part]:
        line = self.line
        self.take()
        end = self.text.find("'", self.pos)
        if end < 0:
            raise ConfigError(f"line {line}: this ' is not closed")
        content = self.take(end - self.pos)
        self.take()
        return [
            Literal(part, line + idx, quoted=True) for idx, part in enumerate(content.splitlines(keepends=True) or [""])
        ]

    def quoted_parts(self, end: str) -> list[Part]:
        """Read what stands in double quotes; ``end`` is what closes it, empty: the end of the text."""
        parts: list[Part] = []
        line, content, opened = self.line, "", self.line
        while True:
            if self.pos >= len(self.text):
                if end:
                    raise ConfigError(f"line {opened}: this {end} is not closed")
                break
            char = self.peek()
            if end and char == end:
                self.take()
                break
            if char == "\\" and self.peek(2)[1:] in ("$", "`", '"', "\\", "\n"):
                self.take()
                taken = self.take()
                if taken == "\n":
                    parts.append(Literal(content, line, quoted=True))
                    line, content = self.line, ""
                else:
                    content += taken
            elif char in "$`":
                parts.append(Literal(content, line, quoted=True))
                parts.append(self.expansion(quoted=True))
                line, content = self.line, ""
            else:
                content += self.take()
                if char == "\n":
                    parts.append(Literal(content, line, quoted=True))
                    line, content = self.line, ""
        parts.append(Literal(content, line, quoted=True))
        return [part for part in parts if not isinstance(part, Literal) or part.text]

    def expansion(self, *, quoted: bool) -> Part:
        """Read what begins with ``$`` or a backquote."""
        line = self.line
        if self.peek() == "`":
            self.take()
            end = self.text.find("`", self.pos)
            if end < 0:
                raise ConfigError(f"line {line}: this ` is not closed")
            content = self.take(end - self.pos)
            self.take()
            return Computed(content, line, quoted, is_arithmetic=False)
        self.take()
        if self.peek(2) == "((":
            return Computed(self.enclosed("((", "))"), line, quoted, is_arithmetic=True)
        if self.peek() == "(":
            return Computed(self.enclosed("(", ")"), line, quoted, is_arithmetic=False)
        if self.peek() == "{":
            return self._braced(line, quoted)
        match = NAME.match(self.text, self.pos) or re.compile(r"[0-9@*#?$!-]").match(self.text, self.pos)
        if not match:
            return Literal("$", line, quoted)
        self.take(len(match[0]))
        return Variable(match[0], line, quoted)

    def _braced(self, line: int, quoted: bool) -> Part:
        self.take()
        match = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]\n]*)\])?").match(self.text, self.pos)
        if not match:
            end = self.text.find("}", self.pos)
            return Computed(self.take(max(end + 1 - self.pos, 1)), line, quoted, is_arithmetic=False)
        self.take(len(match[0]))
        operator = re.compile(r":?[-=?+]|##?|%%?|//?|,,?|\^\^?|:|@").match(self.text, self.pos)
        self.take(len(operator[0]) if operator else 0)
        argument = self.word("}")
        if self.peek() != "}":
            raise ConfigError(f"line {line}: this ${{ has no }}")
        self.take()
        name = match[1] + match[2] if match[1] and match[2] != "#" else match[2]
        return Variable(name, line, quoted, match[3] or "", operator[0] if operator else "", argument)

    def enclosed(self, begin: str, end: str) -> str:
        """Return what stands between two brackets, which may nest."""
        line, start = self.line, self.pos
        self.take(len(begin))
        depth = 1
        inside = begin[0], end[0]
        while depth:
            if self.pos >= len(self.text):
                raise ConfigError(f"line {line}: this {begin} has no {end}")
            if len(end) == 2 and depth == 1 and self.peek(2) == end:
                self.take(2)
                break
            char = self.take()
            if char in "'\"" and begin == "(":
                close = self.text.find(char, self.pos)
                self.take(close + 1 - self.pos if close >= 0 else 0)
            depth += (char == inside[0]) - (char == inside[1])
        return self.text[start + len(begin) : self.pos - len(end)]
