"""The exception tree. Every message says what, the numbers, the cause and the smallest fix.

MeshwrightError
 +- ConfigError            bad input from the user or a file                          exit code 2
 |   +- UnknownModelError  a config.json of no known family
 +- ProfileError           a profile that does not belong to this hardware/software   exit code 2
 +- InfeasibleError        nothing fits; names the binding resource                   exit code 1
 +- SolverLimitError       a time limit ended the search before any answer            exit code 1
 +- RuntimeMismatchError   a plan that this machine, job or torch cannot execute      exit code 1
 +- NodesNotMetError       not all nodes of a job came to the meeting place           exit code 1
 +- InterruptedRunError    a signal ended a job                                       exit code 128 + signal
"""

from __future__ import annotations

import signal

_CONTROLS = {number: "?" for number in (*range(32), *range(127, 160)) if chr(number) not in "\n\t"}


def printable(text: str) -> str:
    """Return a text for the terminal, which control characters in a name would command."""
    return text.translate(_CONTROLS)


class MeshwrightError(Exception):
    """Base of everything a user can cause.

    Args:
        message: what went wrong, one line, with the numbers.
        details: further lines: the cause, the parts, the constraint's name.
        help: the smallest change that fixes it.
    """

    exit_code = 1

    def __init__(self, message: str, details: tuple[str, ...] = (), help: str | None = None) -> None:  # noqa: A002
        super().__init__(message, details, help)
        self.message = message
        self.details = tuple(details)
        self.help = help

    def __str__(self) -> str:
        lines = [self.message, *(f"  {line}" for line in self.details)]
        if self.help:
            lines.append(f"  help: {self.help}")
        return printable("\n".join(lines))


class ConfigError(MeshwrightError):
    """Bad input: a name, number, string or file that cannot mean anything."""

    exit_code = 2


class UnknownModelError(ConfigError):
    """A config.json of no known family; its model may be traced where transformers has it."""


class ProfileError(MeshwrightError):
    """A profile of other hardware or of another software version, or one that is damaged."""

    exit_code = 2


class InfeasibleError(MeshwrightError):
    """No layout satisfies every constraint; the message names the one that binds."""


class SolverLimitError(MeshwrightError):
    """A limit ended the search before it had any answer."""


class RuntimeMismatchError(MeshwrightError):
    """The plan and this machine, job or torch do not match."""


class NodesNotMetError(MeshwrightError):
    """A job on several nodes did not begin: one did not come, or what they met at went away."""


class InterruptedRunError(MeshwrightError):
    """A signal to the launcher ended the job."""

    def __init__(self, received: int, checkpoint_step: int | None = None) -> None:
        number = signal.Signals(received)
        super().__init__(
            f"interrupted by {number.name}; every rank of this node was stopped",
            details=() if checkpoint_step is None else (f"the checkpoint of step {checkpoint_step} is whole",),
            help=None if checkpoint_step is None else "go on from it with --resume",
        )
        self.exit_code = 128 + number
        self.args = (received, checkpoint_step)  # what pickle makes it from
