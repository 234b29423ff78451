"""Fuzz the readers of files, guided by the lines that a document reaches.

    python tests/fuzz/readers.py --seconds 600 --reader all

Documents are mutations of valid ones (targets.py, mutations.py). One that reaches a pair of consecutive lines of our readers that
none reached before is kept and mutated further. A finding is anything but a value or one of our errors: another exception, more
than ``--limit-s`` seconds of processor time, more than ``--memory-gib`` of memory, or an operation that no reader has a reason
for (starting a program, opening a connection, deleting a file). Each kind of finding is printed once, with the document that
made it in ``--out``; the exit code is the number of kinds, at most 100.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "fuzz"), str(TESTS / "parity")]

import meshwright.schema  # noqa: E402
from mutations import mutated  # noqa: E402
from targets import TARGETS, Target, attempt  # noqa: E402

ROOT = str(Path(meshwright.schema.__file__).resolve().parents[1])
TRACED = ("schema/", "engines/", "planner/expert_", "validation/", "cost_models/pipeline/orders", "runtime/training/data_files",
          "runtime/job/rendezvous", "runtime/weights/", "runtime/training/checkpoint", "profilers/files")  # fmt: skip
FORBIDDEN = frozenset({
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect",
    "os.remove", "os.mkdir", "os.rename", "os.rmdir", "os.putenv", "os.kill", "shutil.rmtree", "pty.spawn", "urllib.Request",
})  # fmt: skip
LONGEST_DOCUMENT = 200_000


class Hang(BaseException):
    """The processor time of one document is over."""


class Executed(BaseException):
    """A document made its reader do what no reader does."""


class Guard:
    """Watches what happens while one document is read."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._is_on, self._forbidden = limit_s, False, ""
        signal.signal(signal.SIGVTALRM, self._hang)
        sys.addaudithook(self._audit)

    def _hang(self, received: int, frame: FrameType | None) -> None:
        raise Hang

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_on and event in FORBIDDEN and tempfile.gettempdir() not in str(args[:1]):
            self._forbidden = f"{event} {args!r}"
            raise Executed(self._forbidden)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Limits hold inside."""
        self._is_on, self._forbidden = True, ""
        signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s)
        faulthandler.dump_traceback_later(20 * self._limit_s, exit=True)  # C code that never returns to the interpreter
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            faulthandler.cancel_dump_traceback_later()
            self._is_on = False
        if self._forbidden:  # somebody caught it
            raise Executed(self._forbidden)


class Lines:
    """Pairs of consecutive lines of our readers that were run."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, int]] = set()
        self._now: set[tuple[int, int, int]] = set()
        self._is_ours: dict[Any, bool] = {}
        self.names: dict[int, str] = {}

    def of(self, call: Callable[[], None]) -> int:
        """How many new pairs a call runs."""
        self._now = set()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(None)
            new = self._now - self.seen
            self.seen |= new
        return len(new)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code not in self._is_ours:
            name = code.co_filename
            inside = name.rpartition("/meshwright/")[2] if "/meshwright/" in name else name.removeprefix(f"{ROOT}/")
            self._is_ours[code] = inside.startswith(TRACED)
            self.names[id(code)] = f"{inside}:{code.co_firstlineno}"
        if not self._is_ours[code]:
            return None
        before, place = 0, id(code)

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before
            self._now.add((place, before, frame.f_lineno))
            before = frame.f_lineno
            return step

        return step


class Findings:
    """Kinds of findings, each with the first document that made it."""

    def __init__(self, out: Path) -> None:
        self._out, self.kinds = out, {}  # type: ignore[var-annotated]
        out.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, target: Target, data: bytes, error: BaseException) -> None:
        """Print and keep what is of a new kind: the exception and where it was raised."""
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/meshwright/" in frame.filename]
        where = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "?"
        kind = (name, type(error).__name__, where if not isinstance(error, Hang) else "")
        if kind in self.kinds:
            self.kinds[kind] += 1
            return
        self.kinds[kind] = 1
        path = self._out / f"{name}-{len(self.kinds)}{target.suffix}"
        path.write_bytes(data)
        text = "".join(traceback.format_exception(error)[-6:]) if len(frames) < 400 else type(error).__name__
        print(f"--- {name}: {type(error).__name__} at {where}\n    {path}\n{text[-1500:]}", flush=True)


class Kept:
    """Documents that reached something new, in a folder where a later run begins with them; nowhere without one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def of(self, name: str) -> list[bytes]:
        """What earlier runs kept of a reader, in a fixed order."""
        return [path.read_bytes() for path in sorted(self._folder.glob(f"{name}/*"))] if self._folder else []

    def add(self, name: str, data: bytes) -> None:
        """Keep a document."""
        if self._folder is not None:
            path = self._folder / name / hashlib.sha256(data).hexdigest()[:24]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def fuzz(name: str, seconds: float, *, seed: int, guard: Guard, findings: Findings, kept: Kept) -> tuple[int, int, int]:
    """Documents tried, documents kept and pairs of lines reached within so many seconds."""
    target, chosen, lines = TARGETS[name], random.Random(f"{seed} {name}"), Lines()
    corpus = [*target.documents(), *kept.of(name)]
    tried = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for data in corpus:
            lines.of(lambda data=data: attempt(target, data, Path(folder)))  # type: ignore[misc]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            # the newest documents are the ones least explored
            base = chosen.choice(corpus[-20:]) if chosen.random() < 0.5 else chosen.choice(corpus)
            data = mutated(base, target.form, corpus, chosen)[:LONGEST_DOCUMENT]
            tried += 1
            if _is_new(name, target, data, Path(folder), lines, guard, findings) and len(data) < 20_000:
                corpus.append(data)
                kept.add(name, data)
    return tried, len(corpus), len(lines.seen)


def _is_new(
    name: str, target: Target, data: bytes, folder: Path, lines: Lines, guard: Guard, findings: Findings
) -> bool:
    def read() -> None:
        with guard.watching():
            attempt(target, data, folder)

    try:
        return lines.of(read) > 0
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever it is, it is a finding
        sys.settrace(None)
        findings.add(name, target, data, error)
        return False


def main() -> int:
    """Fuzz one reader after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of all readers together")
    parser.add_argument("--reader", default="all", help=f"all, or some of {', '.join(TARGETS)}, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=5.0, help="processor time of one document")
    parser.add_argument(
        "--memory-gib", type=float, default=2.0, help="of address space beyond what is used at the start"
    )
    parser.add_argument("--corpus", type=Path, help="folder where documents are kept for, and taken from, other runs")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "meshwright-fuzz")
    options = parser.parse_args()
    names = list(TARGETS) if options.reader == "all" else options.reader.split(",")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + int(options.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    warnings.simplefilter("ignore")
    guard, findings, kept = Guard(options.limit_s), Findings(options.out), Kept(options.corpus)
    for name in names:
        share_s = options.seconds / len(names)
        tried, grown, pairs = fuzz(name, share_s, seed=options.seed, guard=guard, findings=findings, kept=kept)
        print(f"{name:18} {tried:7} documents, {grown:4} kept, {pairs:5} pairs of lines", flush=True)
    for (name, error, where), count in findings.kinds.items():
        print(f"{count:6} x {name}: {error} {where}")
    return min(len(findings.kinds), 100)


if __name__ == "__main__":
    sys.exit(main())
