"""Judge the test suite by small faults: apply one at a time to a copy of the tree and see whether a test fails.

    python benchmarks/mutants.py [--tier short|all] [--narrow] [--only WORD ...] [--tests PATH ...] [--list] [--out FILE]

mutants.toml lists the faults, each an exact text, what it becomes, what that breaks, and the tests most likely to notice. A
text that is not exactly once in its file, or else in its folder, is an error: the fault is not there, so nothing was judged.
Of each mutant run its own tests in their order ("golden" among them: the quick golden answers), then all golden answers (but
of the runtime, which they do not reach), and then, unless --narrow, the complete tier; the first test that fails ends it. A
run of more than --limit-s ends it too, as caught: a test that hangs is noticed. Outcomes go to mutants.json, where those of
other mutants stay.

The tests must pass without a fault: --baseline runs all tests that mutants name, once, on the copy as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "benchmarks" / "mutants.toml"
GOLDEN = "tests/golden"
QUICK_GOLDEN = "golden"
"""What a mutant names among its tests for the quick golden answers."""
OF_LIST = "tests/unit/test_benchmarks.py::test_mutants_are_in_the_code_once"
"""It fails under any mutant, which is no judgement."""
TIERS: dict[str, tuple[str, ...]] = {"short": ("-m", "not long"), "all": ()}
"""Options of pytest that select the tests of a tier."""
FAILED = (1, 2)
"""Exit codes of pytest where a test failed, and where one could not be collected because what it imports is broken."""


class Mutant(NamedTuple):
    """A fault: ``old`` in ``file`` becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


class Outcome(NamedTuple):
    """Whether a mutant was noticed: by which test, at which step (its own tests, the golden answers, the tier), after how long."""

    caught: bool
    by: str
    step: str
    seconds: float


class MissingTextError(Exception):
    """A mutant whose text is not there exactly once, or whose tests cannot run."""


def read_mutants() -> list[Mutant]:
    """Return the mutants of the list, in its order."""
    entries = tomllib.loads(LIST.read_text())["mutant"]
    mutants = [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    return mutants


def file_of(mutant: Mutant, root: Path) -> Path:
    """Return the file that holds a mutant's text: the named one, or the only one of its folder where the text has moved.

    Raises:
        MissingTextError: no file or several hold it, or one does several times.
    """
    named = root / mutant.file
    if named.exists() and named.read_text().count(mutant.old) == 1:
        return named
    counts = {
        path: path.read_text().count(mutant.old) for path in (root / named.relative_to(root).parts[0]).rglob("*.py")
    }
    if sum(counts.values()) != 1:
        raise MissingTextError(
            f"{mutant.name}: its text is in {sum(counts.values())} places, not one; last in {mutant.file}"
        )
    return next(path for path, count in counts.items() if count)


def problems(mutants: Sequence[Mutant], root: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with the list against a tree."""
    for mutant in mutants:
        try:
            file_of(mutant, root)
        except MissingTextError as error:
            yield str(error)
        if mutant.old == mutant.new:
            yield f"{mutant.name}: changes nothing"
        for test in mutant.tests:
            if test != QUICK_GOLDEN and not (root / test.partition("::")[0]).exists():
                yield f"{mutant.name}: no tests {test}"


def copy_tree(to: Path) -> dict[str, str]:
    """Copy what git tracks or would track; return the environment in which the copy is what `import meshwright` finds.

    Compiled files are checked by the hash of their source: a mutant of equal size in the same second is compiled anew.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    package = to / ".import" / "meshwright"
    package.mkdir(parents=True)
    folders = sorted({name.split("/")[0] for name in listed if name.endswith("/py.typed")})
    for folder in folders:
        (package / folder).symlink_to(to / folder)
    compiling = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *folders]
    subprocess.run([sys.executable, *compiling], cwd=to, check=True)
    return {**os.environ, "PYTHONPATH": str(package.parent)}


def run_tests(tree: Path, env: dict[str, str], options: Sequence[str], *, limit_s: float) -> tuple[int, str]:
    """Exit code and output of pytest up to the first failure; 124 where the limit ended it, with all that it started."""
    flags = ("-x", "-q", "-p", "no:cacheprovider", "--tb=line", f"--deselect={OF_LIST}")
    command = [sys.executable, "-m", "pytest", *flags, *options]
    process = subprocess.Popen(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 124, output
    except BaseException:  # Ctrl-C must not leave tests behind
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def steps(mutant: Mutant, options: argparse.Namespace) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what is run of a mutant, in order: the name of the step and the options of pytest."""
    tier = TIERS[options.tier]
    if options.tests:
        yield "given tests", (*options.tests, *tier)
        return
    for is_golden, tests in itertools.groupby(mutant.tests, lambda test: test == QUICK_GOLDEN):
        yield ("quick golden", (GOLDEN, "-k", "quick", *tier)) if is_golden else ("its tests", (*tests, *tier))
    if not mutant.file.startswith("runtime/"):
        yield "golden", (GOLDEN, *tier)
    if not options.narrow:
        yield "tier", ("tests", *tier)


def judge(mutant: Mutant, tree: Path, env: dict[str, str], options: argparse.Namespace) -> Outcome:
    """Apply a mutant to the copy, run its steps up to the first failure, and take it back."""
    path, start = file_of(mutant, tree), time.perf_counter()
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        for step, selection in steps(mutant, options):
            code, output = run_tests(tree, env, selection, limit_s=options.limit_s)
            if code in FAILED:
                return Outcome(True, _first_failure(output), step, time.perf_counter() - start)
            if code == 124:
                return Outcome(True, "a test hangs", step, time.perf_counter() - start)
            if code not in (0, 5):  # 5: nothing of these files is in the tier
                raise MissingTextError(
                    f"{mutant.name}: pytest {' '.join(selection)} ended with {code}\n{output[-2000:]}"
                )
    finally:
        path.write_text(text)
    return Outcome(False, "", "", time.perf_counter() - start)


def _first_failure(output: str) -> str:
    failure = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
    return failure[1] if failure else output.strip().splitlines()[-1][:200]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=tuple(TIERS), default="short")
    parser.add_argument("--only", nargs="*", default=[], help="mutants whose name or file has one of the words")
    parser.add_argument("--tests", nargs="*", default=[], help="tests to run in place of a mutant's own and the tier")
    parser.add_argument("--narrow", action="store_true", help="a mutant's own tests and the golden answers only")
    parser.add_argument("--list", action="store_true", help="check the list against the tree and run nothing")
    parser.add_argument("--baseline", action="store_true", help="run the named tests without a fault")
    parser.add_argument("--again", choices=("survived", "new"), help="only those that mutants.json calls so")
    parser.add_argument("--limit-s", type=float, default=1800.0)
    parser.add_argument("--out", type=Path, default=LIST.with_suffix(".json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    mutants = read_mutants()
    outcomes: dict[str, dict[str, Any]] = json.loads(options.out.read_text())["mutants"] if options.out.exists() else {}
    chosen = [mutant for mutant in mutants if _is_chosen(mutant, options, outcomes)]
    wrong = list(problems(chosen))
    print(*wrong, f"{len(chosen)} of {len(mutants)} mutants, {len(wrong)} problems", sep="\n")
    if wrong or options.list:
        return int(bool(wrong))
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        env = copy_tree(tree)
        if options.baseline:
            named = sorted({test for mutant in chosen for test in mutant.tests} - {QUICK_GOLDEN})
            code, output = run_tests(tree, env, (*named, *TIERS[options.tier]), limit_s=options.limit_s)
            print(output[-4000:])
            return code
        for mutant in chosen:
            outcome = judge(mutant, tree, env, options)
            word = "caught" if outcome.caught else "survived"
            print(f"{word:9}{outcome.seconds:6.0f} s  {mutant.name}  {outcome.by}", flush=True)
            outcomes[mutant.name] = {
                "file": str(file_of(mutant, ROOT).relative_to(ROOT)),
                "breaks": mutant.breaks,
                "outcome": word,
                "by": outcome.by,
                "step": outcome.step,
                "tier": options.tier,
                "seconds": round(outcome.seconds, 1),
            }
            _write(options.out, mutants, outcomes)
    survived = [mutant.name for mutant in chosen if outcomes[mutant.name]["outcome"] == "survived"]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} caught by {options.tier}", *survived, sep="\n  ")
    return int(bool(survived))


def _is_chosen(mutant: Mutant, options: argparse.Namespace, outcomes: dict[str, dict[str, Any]]) -> bool:
    before = outcomes.get(mutant.name, {}).get("outcome", "new")
    words = options.only
    return (not words or any(word in mutant.name or word in mutant.file for word in words)) and (
        options.again in (None, before)
    )


def _write(path: Path, mutants: Sequence[Mutant], outcomes: dict[str, dict[str, Any]]) -> None:
    """Write the outcomes of the mutants that are in the list, in its order."""
    known = {mutant.name: outcomes[mutant.name] for mutant in mutants if mutant.name in outcomes}
    caught = sum(outcome["outcome"] == "caught" for outcome in known.values())
    summary = {"mutants": len(mutants), "judged": len(known), "caught": caught, "python": platform.python_version()}
    path.write_text(json.dumps({"summary": summary, "mutants": known}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
