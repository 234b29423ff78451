r"""A shell script as a tree: the part of bash that launch scripts are written in. Nothing is run.

Read: words with quotes, `\` at the end of a line, comments, `$A`, `${A}`, `${A:-b}` and its kin, `$((1+2))`, `$(...)` (kept as
text), assignments with `=` and `+=`, arrays, redirections, here-documents, `&&`, `||`, `;`, `|`, if, case, for, while, until,
functions, groups, `[ ]`, `[[ ]]` and `(( ))`. What else bash has (process substitution, `select`, aliases) is no syntax of its own
here: it comes out as words.
"""

from __future__ import annotations

import re

from ...schema.errors import ConfigError
from .shell_tree import (
    Assignment,
    Case,
    Chain,
    Command,
    Conditional,
    Function,
    Group,
    Literal,
    Loop,
    Simple,
    Test,
    Word,
    plain_text,
)
from .shell_words import BLANK, ENDS, NAME, WordReader

_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\n]*\])?(\+?=)")
_REDIRECTION = re.compile(r"[0-9]*(<<<|<<-?|>>|>&|&>>?|<&|>\||[<>])")
_FUNCTION = re.compile(r"(?:function[ \t]+)?([A-Za-z_][\w-]*)[ \t]*\([ \t]*\)|function[ \t]+([A-Za-z_][\w-]*)")
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})


def parse_script(text: str) -> list[Command]:
    """Return the commands of a script.

    Raises:
        ConfigError: a quote, a bracket or a keyword has no end; the line where it began.
    """
    parser = _Parser(text.replace("\r\n", "\n"))
    commands = parser.commands(())
    if parser.pos < len(parser.text):
        raise ConfigError(f"line {parser.line}: unexpected {parser.text[parser.pos : parser.pos + 10]!r}")
    return commands


class _Parser(WordReader):
    def commands(self, ends: tuple[str, ...]) -> list[Command]:
        """Read commands up to one of the ends, which are keywords, ``)`` or ``;;``, or the end of the text."""
        commands_read: list[Command] = []
        while True:
            self.gaps()
            if (
                self.pos >= len(self.text)
                or self.keyword(*ends)
                or any(self.peek(len(e)) == e for e in ends if e in (")", ";;"))
            ):
                return commands_read
            before = self.pos
            commands_read.append(self.chain())
            if self.pos == before:
                raise ConfigError(f"line {self.line}: unexpected {self.peek(10)!r}")

    def chain(self) -> Command:
        items, joint = [], ""
        while True:
            items.append((joint, self.command()))
            self.blanks()
            if self.peek(2) in ("&&", "||"):
                joint = self.take(2)
                self.gaps()
            elif self.peek() == "|":
                self.take(2 if self.peek(2) == "|&" else 1)
                self.gaps()
                self.command()  # what reads an output decides nothing
                joint = "|"
                self.blanks()
                if self.peek(2) not in ("&&", "||") and self.peek() != "|":
                    break
            else:
                break
        return items[0][1] if len(items) == 1 else Chain(items)

    def command(self) -> Command:
        self.blanks()
        line = self.line
        if self.peek() == "!" and self.peek(2)[1:] in (*BLANK,):
            self.take()
            return Chain([("!", self.command())])
        if self.peek(2) == "((":
            return Test(line, [], arithmetic=self.enclosed("((", "))"))
        if self.peek() == "(":
            self.take()
            return self._until(Group, line, ")")
        word = self.keyword("if", "case", "for", "while", "until", "{", "[[", "function", "select")
        if match := _FUNCTION.match(self.text, self.pos):
            self.take(match.end() - self.pos)
            self.gaps()
            body = self.command()
            return Function(match[1] or match[2], [body])
        if word:
            self.take(len(word))
        if word == "{":
            return self._until(Group, line, "}")
        if word == "[[":
            return Test(line, self.test_words(line))
        if word == "if":
            return self._if(line)
        if word in ("while", "until"):
            condition = self.commands(("do",))
            return Loop(line, "", [], condition, self._do(line), is_until=word == "until")
        if word in ("for", "select"):
            return self._for(line)
        if word == "case":
            return self._case(line)
        return self.simple()

    def _until(self, kind: type[Group], line: int, end: str) -> Group:
        body = self.commands((end,))
        self.expect(end, line)
        return kind(body)

    def _do(self, line: int) -> list[Command]:
        self.expect("do", line)
        body = self.commands(("done",))
        self.expect("done", line)
        return body

    def _if(self, line: int) -> Conditional:
        branches = []
        while True:
            condition = self.commands(("then",))
            self.expect("then", line)
            branches.append((condition, self.commands(("elif", "else", "fi"))))
            end = self.keyword("elif", "else", "fi")
            self.take(len(end))
            if end == "else":
                branches.append(([], self.commands(("fi",))))
                self.expect("fi", line)
            elif not end:
                raise ConfigError(f"line {line}: this `if` has no `fi`")
            if end != "elif":
                return Conditional(line, branches)

    def _for(self, line: int) -> Loop:
        self.blanks()
        if self.peek(2) == "((":
            self.enclosed("((", "))")
            return Loop(line, "", [], [], self._do(line))
        name, words = NAME.match(self.text, self.pos), []
        self.take(len(name[0]) if name else 0)
        self.gaps()
        if self.keyword("in"):
            self.take(2)
            self.blanks()
            while self.pos < len(self.text) and self.peek() not in ENDS + "<>":
                words.append(self.word())
                self.blanks()
        return Loop(line, name[0] if name else "", words, [], self._do(line))

    def _case(self, line: int) -> Case:
        self.blanks()
        word, branches = self.word(), []
        self.expect("in", line)
        self.gaps()
        while not self.keyword("esac"):
            patterns = []
            while self.peek() != ")":
                if self.peek() in "(|":
                    self.take()
                self.blanks()
                before = self.pos
                patterns.append(self.word())
                self.blanks()
                if self.pos == before:
                    raise ConfigError(f"line {line}: this `case` has no `esac`")
            self.take()
            branches.append((patterns, self.commands((";;", "esac"))))
            if self.peek(2) == ";;":
                self.take(2)
            self.gaps()
        self.take(4)
        return Case(line, word, branches)

    def test_words(self, line: int) -> list[Word]:
        words: list[Word] = []
        while True:
            self.blanks()
            if self.peek() == "\n":
                self.take()
            elif self.peek(2) == "]]":
                self.take(2)
                return words
            elif self.pos >= len(self.text):
                raise ConfigError(f"line {line}: this [[ has no ]]")
            elif self.peek(2) in ("&&", "||"):
                words.append((Literal(self.take(2), self.line),))
            elif self.peek() in "()<>;&|":
                words.append((Literal(self.take(), self.line),))
            else:
                words.append(self.word())

    def simple(self) -> Simple:
        command = Simple(self.line)
        declares = False
        while self.pos < len(self.text):
            self.blanks()
            if not self.peek() or self.peek() in "\n;)|":
                break
            redirection = _REDIRECTION.match(self.text, self.pos)
            if self.peek() == "&" and not redirection:
                break
            if self.peek() == "(":
                self.enclosed("(", ")")  # e.g. process substitution
            elif self.peek() == "#":
                self.comment()
            elif redirection:
                self.redirect(command, redirection)
            elif (not command.words or declares) and (match := _ASSIGNED.match(self.text, self.pos)):
                command.assignments.append(self.assignment(match))
            else:
                word = self.word()
                declares = declares or (not command.words and plain_text(word) in _DECLARING)
                command.words.append(word)
        return command

    def assignment(self, match: re.Match[str]) -> Assignment:
        line = self.line
        self.take(match.end() - self.pos)
        appends = match[3] == "+=" or bool(match[2])
        if self.peek() != "(":
            blank = not self.peek() or self.peek() in BLANK + ENDS
            value: Word = () if blank else self.word()
            return Assignment(match[1], (value,) if match[2] else value, bool(match[2]), appends)
        self.take()
        values: list[Word] = []
        self.gaps()
        while self.peek() != ")":
            if self.pos >= len(self.text):
                raise ConfigError(f"line {line}: the array {match[1]}=( has no )")
            start = self.pos
            if self.peek() not in "&|(":
                values.append(self.word())
            if self.pos == start:  # what is no part of a word
                self.take()
            self.gaps()
        self.take()
        return Assignment(match[1], tuple(values), True, appends)

    def redirect(self, command: Simple, match: re.Match[str]) -> None:
        self.take(match.end() - self.pos)
        self.blanks()
        word = self.word() if self.peek() and self.peek() not in ENDS else ()
        if match[1] in ("<<", "<<-"):
            delimiter = "".join(part.text for part in word if isinstance(part, Literal))
            quoted = any(isinstance(part, Literal) and part.quoted for part in word)
            self.pending.append((command, delimiter, quoted, match[1] == "<<-"))
        elif match[1] in (">", ">>", ">|"):
            command.output = word
