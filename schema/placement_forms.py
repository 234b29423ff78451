"""How ranks of tensor parallelism hold a value and its gradient: the four forms, by which operators are placed.

| form      | each rank has                                                     | its gradient on each rank |
|-----------|-------------------------------------------------------------------|---------------------------|
| ``I``     | the whole value                                                   | the whole gradient        |
| ``R``     | the whole value                                                   | a summand                 |
| ``S1x3``  | its part of dimension 1, which is 3 equal runs that are cut alike | its part                  |
| ``P``     | a summand                                                         | the whole gradient        |

The gradient of a form is held as its dual: I as I, S as S, R as P and P as R. So the local operator's own autograd is right
whatever the placement, and only forward passes are planned. Parameters are I or S.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

FormKind = Literal["I", "R", "S", "P"]
Move = Literal["none", "slice", "divide", "gather", "exchange", "pad", "sum", "scatter"]


class Form(NamedTuple):
    """A form; ``dim`` and ``runs`` of S only."""

    kind: FormKind
    dim: int = 0
    runs: int = 1

    @classmethod
    def parse(cls, text: str) -> Form:
        """Read what `str` writes."""
        if text[0] != "S":
            return cls(text[0])  # type: ignore[arg-type]
        dim, _, runs = text[1:].partition("x")
        return cls("S", int(dim), int(runs or 1))

    def __str__(self) -> str:
        """Return the short form, as ``S1x3``."""
        if self.kind != "S":
            return self.kind
        return f"S{self.dim}" if self.runs == 1 else f"S{self.dim}x{self.runs}"

    @property
    def is_entire(self) -> bool:
        """True where every rank has the whole value."""
        return self.kind in "IR"

    @property
    def dual(self) -> Form:
        """The form in which the gradient is held, as a value."""
        return Form("P") if self.kind == "R" else Form("R") if self.kind == "P" else self


ENTIRE, REPEATED, SUMMAND = Form("I"), Form("R"), Form("P")


def move_between(source: Form, target: Form) -> Move:
    """Return what makes the values of one form those of another; the gradient makes the move from the target's dual back.

    A sum is an all-reduce, a scatter a reduce-scatter, an exchange an all-to-all; slice, divide and pad send nothing.
    """
    if source.is_entire:
        return "none" if target.is_entire else "slice" if target.kind == "S" else "divide"
    if source.kind == "S":
        if target.kind == "S":
            return "none" if source == target else "exchange"
        return "gather" if target.is_entire else "pad"
    return "sum" if target.is_entire else "scatter" if target.kind == "S" else "none"


def moves(source: Form, target: Form) -> tuple[Move, Move]:
    """Return what a conversion does forward and backward."""
    return move_between(source, target), move_between(target.dual, source.dual)
