"""Fuzz the commands: whole command lines over mutated files and words, each in a process of its own.

    python tests/fuzz/fuzz_commands.py --seconds 600
    python tests/fuzz/fuzz_commands.py --inputs 20000 --seed 1

Everything is imported once, and each command line runs in a fork, so that one costs little more than its work. A finding is a
traceback, an exit code that no command has, more than ``--limit-s`` seconds of processor time (or ten times as many on the clock),
more than ``--memory-gib`` of memory, or a file that a name in a document made a shell write. Each kind is printed once, its folder
(``argv.json`` and the files) stays in ``--out``; the exit code is the number of kinds, at most 100. With ``--guided`` a document
that reaches new pairs of lines of our readers is mutated further. With ``--options`` nothing is mutated: lines have one to four
further options of their command, with values that the documentation gives them (options.py). With ``--typed`` plans and profiles
have values that their types allow (typed.py), and nothing else is mutated.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", COLUMNS="120")
FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "parity")]

import mutations  # noqa: E402
from command_lines import COMMANDS, Document, documents  # noqa: E402
from options import options_of, with_options  # noqa: E402
from readers import LONGEST_DOCUMENT, Lines  # noqa: E402
from typed import schema_of, typed_mutated  # noqa: E402

GROUPS = (
    "schema",
    "cost_models",
    "solvers",
    "planner",
    "engines",
    "validation",
    "cli",
    "profilers",
    "runtime.job",
    "runtime.weights",
)
"""Packages that are imported before the first fork."""
TYPED = (
    "plan",
    "sharded",
    "measured",
    "trainable",
    "serving",
    "rl-plan",
    "rl-own",
    "generation",
    "plan-megatron",
    "profile",
)
"""Documents whose types are known."""
CODES = {0, 1, 2, 130}
EXECUTED = "executed"
"""A file that the words of mutations ask a shell to make."""


@dataclass(frozen=True)
class Outcome:
    """What a command line did; ``kind`` is empty where all was well."""

    kind: str
    cpu_s: float
    code: int
    pairs: frozenset[int] = frozenset()


def warm() -> None:
    """Import all that commands import."""
    import meshwright

    for group in GROUPS:
        package = importlib.import_module(f"meshwright.{group}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    assert meshwright


def run(words: Sequence[str], folder: Path, *, limit_s: float, memory: int, guided: bool = False) -> Outcome:
    """Run a command line in a fork whose working folder is the given one; ``memory`` is in bytes."""
    pid = os.fork()
    if pid == 0:
        _child(words, folder, limit_s=limit_s, memory=memory, guided=guided)
    handle = os.pidfd_open(pid)
    ready, _, _ = select.select([handle], [], [], 10 * limit_s)
    os.close(handle)
    if not ready:
        os.killpg(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it left running
    cpu_s, code = used.ru_utime + used.ru_stime, os.waitstatus_to_exitcode(status)
    said = (folder / "stderr").read_text(errors="replace")
    pairs = folder / "pairs.json"
    found = frozenset(json.loads(pairs.read_text())) if guided and pairs.exists() else frozenset()
    is_over = not ready or cpu_s > limit_s or code in (-signal.SIGXCPU, -signal.SIGKILL)
    kind = f"over {limit_s:g} s" if is_over else _kind(folder, said, code, is_large=used.ru_maxrss * 1024 > memory)
    name = " ".join(words[: 2 if words[0] in ("experts", "profile") else 1])
    return Outcome(f"{name}: {kind}" if kind else "", cpu_s, code, found)


def _kind(folder: Path, said: str, code: int, *, is_large: bool) -> str:
    """Name what is wrong, in words that are the same for the same fault."""
    if (folder / EXECUTED).exists():
        return "a shell ran a name"
    if "Traceback (most recent call last)" in said or "panicked at" in said:
        frames = re.findall(r'File "[^"]*/((?:[a-z_]+/)?[a-z_]+\.py)", line (\d+)', said)
        last = re.findall(r"^(\w[\w.]*(?:Error|Exception|Interrupt|Exit|Panic\w*))\b", said, re.MULTILINE)
        return f"{last[-1] if last else 'traceback'} at {':'.join(frames[-1]) if frames else '?'}"
    if is_large:
        return "over the memory"
    return "" if code in CODES else f"exit code {code}"


def _child(words: Sequence[str], folder: Path, *, limit_s: float, memory: int, guided: bool) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2 * memory,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = _called(words, folder if guided else None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _called(words: Sequence[str], guided: Path | None) -> int:
    """Call the command as the console does; return its exit code."""
    from meshwright.cli.main import FROM_START, app

    lines, code = Lines(), 0

    def call() -> None:
        nonlocal code
        try:
            app(list(words), obj=FROM_START)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 70

    if guided is None:
        call()
        return code
    lines.of(call)
    stable = {zlib.crc32(f"{lines.names[place]} {before} {line}".encode()) for place, before, line in lines.seen}
    (guided / "pairs.json").write_text(json.dumps(sorted(stable)))
    return code


class Fuzzer:
    """Mutates command lines from a seed.

    Args:
        corpus: the documents of each name, of which those that reach new lines join.
        only: command lines that have this text.
        adds_options: leave documents and words as they are, and add options of the command.
        is_typed: mutate documents whose types are known, and keep to those.
    """

    def __init__(
        self,
        corpus: dict[str, Document],
        seed: int,
        only: str = "",
        *,
        adds_options: bool = False,
        is_typed: bool = False,
    ) -> None:
        self.corpus, self.random, self.adds_options, self.is_typed = corpus, random.Random(seed), adds_options, is_typed
        self.commands = [
            words
            for words in COMMANDS
            if only in " ".join(words)
            and (not adds_options or options_of(*words[:2]))
            and (not is_typed or any(f"{{{name}}}" in word for name in TYPED for word in words))
        ]
        self.seen: set[int] = set()
        self.shell = (
            f"$(touch {EXECUTED})",
            f"`touch {EXECUTED}`",
            f"a; touch {EXECUTED};",
            "[/]",
            "[bold",
            "[/bold]",
            "<b>&'\"",
        )

    def case(self, folder: Path) -> tuple[list[str], tuple[str, bytes] | None]:
        """Write the files of a mutated command line; return its words, with the mutated document and its name where it is one."""
        template = list(self.random.choice(self.commands))
        if self.adds_options:
            return self.written(folder, with_options(template, self.random))
        names = "|".join(TYPED) if self.is_typed else "[a-z-]+"
        places = [idx for idx, word in enumerate(template) if re.search(rf"\{{({names})\}}", word)]
        chosen = self.random.choice(places) if places and (self.is_typed or self.random.random() < 0.8) else None
        if chosen is None:
            self._mutate_word(
                template,
                [idx for idx in range(1, len(template)) if idx not in places and "experts" not in template[:idx][-1:]],
            )
        return self.written(folder, template, chosen)

    def written(
        self, folder: Path, template: Sequence[str], chosen: int | None = None, *, first: bool = False
    ) -> tuple[list[str], tuple[str, bytes] | None]:
        """Write the files of a command line, the ``chosen`` one mutated, with ``first`` the first variant of each."""
        changed, words = None, []
        for idx, word in enumerate(template):
            match = re.fullmatch(r"(.*)\{([a-z-]+)\}(.*)", word)
            if match is None:
                words.append(word)
                continue
            before, name, after = match.groups()
            document = self.corpus[name]
            data = document.variants[0] if first else self.random.choice(document.variants)
            if idx == chosen:
                data = self._mutated(data, document)[:LONGEST_DOCUMENT]
                changed = name, data
            is_named = before.startswith("+")
            path = folder / (before[1:-1] if is_named else f"{idx}{document.suffix}")
            path.write_bytes(data)
            if not is_named:
                words.append(f"{before}{path.name}{after}")
        return words, changed

    def _mutated(self, data: bytes, document: Document) -> bytes:
        if self.is_typed:
            return typed_mutated(data, schema_of(data), document.variants, self.random)
        if document.form is not None and self.random.random() < 0.1:
            return mutations.text_replaced(data, document.form, self.random.choice(self.shell), self.random)
        return mutations.mutated(data, document.form, document.variants, self.random)

    def _mutate_word(self, template: list[str], places: list[int]) -> None:
        # A limit says how long to search or measure, the steps of a job how long to train: longer is what was ordered, no hang.
        lasting = ("limit-s", "budget-s", *(("--steps",) if template[0].startswith("apply") else ()))
        values = [
            idx for idx in places if not template[idx].startswith("--") and not template[idx - 1].endswith(lasting)
        ]
        if not values:
            return
        idx = self.random.choice(values)
        texts = (*mutations.TEXTS, *map(str, mutations.NUMBERS[:24]), *self.shell)
        word = self.random.choice(texts)
        if self.random.random() < 0.6:
            word = mutations.mutated(
                template[idx].encode(), None, [t.encode("utf-8", "replace") for t in texts], self.random
            ).decode("utf-8", "replace")
        template[idx] = word.replace("\0", "").replace("{", "(").encode("utf-8", "replace").decode()[:5000]

    def learn(self, name: str, data: bytes, pairs: frozenset[int]) -> None:
        """Take a document in that reached something new."""
        if pairs - self.seen and len(data) < 20_000:
            self.corpus[name].variants.append(data)
        self.seen |= pairs


def fuzz(
    fuzzer: Fuzzer, goes_on: Callable[[int], bool], out: Path, *, limit_s: float, memory: int, guided: bool
) -> tuple[int, dict[str, int]]:
    """Return how many command lines were run, and how often each kind of finding was met."""
    kinds: Counter[str] = Counter()
    codes: Counter[int] = Counter()
    tried, slowest = 0, 0.0
    while goes_on(tried):
        folder = Path(tempfile.mkdtemp(prefix="command-"))
        words, changed = fuzzer.case(folder)
        outcome = run(words, folder, limit_s=limit_s, memory=memory, guided=guided)
        tried, slowest = tried + 1, max(slowest, outcome.cpu_s)
        codes[outcome.code] += 1
        if outcome.kind:
            kinds[outcome.kind] += 1
            if kinds[outcome.kind] == 1:
                (folder / "argv.json").write_text(json.dumps(words))
                stored = out / re.sub(r"[^\w.]+", "-", outcome.kind)[:100]
                shutil.rmtree(stored, ignore_errors=True)
                shutil.copytree(folder, stored)
                print(f"--- {outcome.kind}\n    {stored}", flush=True)
        elif guided and changed is not None:
            fuzzer.learn(*changed, outcome.pairs)
        shutil.rmtree(folder, ignore_errors=True)
        if tried % 500 == 0:
            print(f"{tried} command lines, exit codes {dict(codes)}, longest {slowest:.1f} s", flush=True)
    print(f"{tried} command lines, exit codes {dict(codes)}, longest {slowest:.1f} s", flush=True)
    return tried, dict(kinds)


def main() -> int:
    """Fuzz until the time or the number is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--inputs", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="command lines that have this text")
    parser.add_argument("--limit-s", type=float, default=20.0)
    parser.add_argument("--memory-gib", type=float, default=1.0)
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--options", action="store_true", help="valid lines with further options of their commands")
    parser.add_argument("--typed", action="store_true", help="plans and profiles of values that their types allow")
    parser.add_argument("--valid", action="store_true", help="run every command line as it is, and say what it did")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "meshwright-fuzz-commands")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    warm()
    limits: dict[str, Any] = {"limit_s": options.limit_s, "memory": int(options.memory_gib * 2**30)}
    fuzzer = Fuzzer(
        documents(lambda words, folder: run(words, folder, **limits)),
        options.seed,
        options.only,
        adds_options=options.options,
        is_typed=options.typed,
    )
    if options.valid:
        return say_valid(fuzzer, limits)
    end = time.monotonic() + (options.seconds or 10**9)
    most = options.inputs or (10**9 if options.seconds else 1000)
    _, kinds = fuzz(
        fuzzer, lambda tried: tried < most and time.monotonic() < end, options.out, guided=options.guided, **limits
    )
    for kind, count in sorted(kinds.items()):
        print(f"{count:6} x {kind}")
    return min(len(kinds), 100)


def say_valid(fuzzer: Fuzzer, limits: dict[str, Any]) -> int:
    """Run every command line with its first documents; return how many did not answer."""
    failed = 0
    for template in fuzzer.commands:
        with tempfile.TemporaryDirectory() as name:
            words, _ = fuzzer.written(Path(name), template, first=True)
            outcome = run(words, Path(name), **limits)
            failed += bool(outcome.kind or outcome.code)
            said = (Path(name) / "stderr").read_text() if outcome.kind or outcome.code else ""
            print(
                f"{outcome.code:3} {outcome.cpu_s:6.2f} s  {' '.join(template)[:110]} {outcome.kind}\n{said[-600:]}",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
