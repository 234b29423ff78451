"""Rewards by a user's function, in a process of its own: what it raises, how long it takes and what it returns harms no rank.

    def exact(sample):      # a row of the prompts file, with "response": its tokens
        return float(sample["response"][-1:] == [sample["answer"]])

``file.py:name`` or ``module:name``. The function is called for each sample; what it prints goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import numbers
import os
import selectors
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ...profilers.run.processes import program
from ...schema.base import shown
from ...schema.errors import ConfigError, MeshwrightError

_START_S = 60.0
"""How long the function's module may take to import."""

_TRACE_LINES = 6


class RewardError(MeshwrightError):
    """A reward function raised, did not answer, or gave no number."""


def split_name(text: str) -> tuple[str, str]:
    """Return file or module, and the name in it.

    Raises:
        ConfigError: it is not of that form, or there is no such file.
    """
    home, colon, name = text.rpartition(":")
    if not colon or not home or not name.isidentifier():
        raise ConfigError(f"--reward {text!r} names no function", help="rewards.py:exact, or package.module:exact")
    try:
        is_missing = home.endswith(".py") and not Path(home).is_file()
    except OSError:  # no name that a file may have
        is_missing = True
    if is_missing:
        raise ConfigError(f"--reward {text}: there is no file {home}")
    return home, name


class RewardProcess:
    """A process that has the function; to be closed."""

    def __init__(self, function: str, *, timeout_s: float) -> None:
        """Start it and wait until the function is there.

        Raises:
            ConfigError: there is no such function.
            RewardError: its module raises or takes too long.
        """
        home, name = split_name(function)
        self.function, self._timeout_s = function, timeout_s
        command = program(__name__, home, name)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ))
        assert self._process.stdout is not None
        self._buffer = b""
        answer = self._read(_START_S, f"its module was not imported within {_START_S:g} s")
        if "error" in answer:
            self.close()
            raise ConfigError(f"--reward {function}: {answer['error']}", details=tuple(answer.get("trace", ())))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def rewards(self, samples: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the reward of each sample.

        Raises:
            RewardError: with the sample, what happened, and where.
        """
        results = []
        for idx, sample in enumerate(samples):
            assert self._process.stdin is not None
            where = f"sample {idx} (prompt {shown(sample.get('prompt'))})"
            try:
                self._process.stdin.write(json.dumps(sample).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise self._error(f"its process ended before {where}") from None
            answer = self._read(self._timeout_s, f"it gave nothing for {self._timeout_s:g} s at {where}")
            if "error" in answer:
                raise self._error(f"{answer['error']} at {where}", *answer.get("trace", ()))
            value = answer["reward"]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise self._error(f"it returned {answer['shown']} at {where}: a reward is a finite number")
            results.append(float(value))
        return results

    def _read(self, limit_s: float, late: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(end - time.monotonic(), 0)):
                    self.close()
                    raise self._error(late)
                part = os.read(self._process.stdout.fileno(), 65536)
                if not part:
                    raise self._error(f"its process ended with exit code {self._process.wait()}")
                self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _error(self, what: str, *trace: str) -> RewardError:
        return RewardError(f"the reward function {self.function} failed: {what}", details=trace)


def load_function(home: str, name: str) -> Callable[[dict[str, Any]], Any]:
    """Import the function that the user named."""
    if home.endswith(".py"):
        spec = importlib.util.spec_from_file_location("rewards_of_user", home)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(home).resolve().parent))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(home)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    loaded: Callable[[dict[str, Any]], Any] = function
    return loaded


def _failure(error: BaseException) -> dict[str, Any]:
    lines = traceback.format_exception(error)
    text = "".join(lines).strip().splitlines()
    return {"error": f"{type(error).__name__}: {error}"[:400], "trace": text[-_TRACE_LINES:]}


def main() -> None:
    """Answer samples line by line until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr

    def tell(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        function = load_function(sys.argv[1], sys.argv[2])
    except BaseException as error:
        tell(_failure(error))
        return
    tell({"ready": True})
    for line in sys.stdin:
        try:
            value = function(json.loads(line))
        except Exception as error:
            tell(_failure(error))
            continue
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        number = float(value) if is_number and math.isfinite(value) else None
        tell({"reward": number, "shown": repr(value)[:80]})


if __name__ == "__main__":
    main()
