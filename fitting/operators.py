"""Fits the learned residuals on measured tables and writes what the package ships.

    python -m meshwright.fitting.operators DATA_FOLDER [--out FOLDER] [--kind gemm ...] [--score]

DATA_FOLDER holds ``operators/`` and ``measured_runs/``. Needs scikit-learn, pandas and pyarrow. ``--score`` adds held-out scores
(rows, sizes, device families left out), printed and stored in the artefacts' provenance.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..cost_models.learned.trees import ResidualModel
from .command import run_command

KINDS = ("gemm", "attention", "grouped_gemm")
"""Operator kinds: ``<kind>_fit.py`` has ``fit(folder, *, score) -> Fitted``."""

COMMAND = "python -m meshwright.fitting.operators DATA_FOLDER --score"


@dataclass(frozen=True)
class FittedModels:
    """What one kind's fit yields.

    Attributes:
        models: artefact name -> model, its provenance stating rows and sources.
        scores: what was left out -> mean absolute percentage error and the like.
    """

    models: Mapping[str, ResidualModel]
    scores: Mapping[str, Any]


def stamped(model: ResidualModel, scores: Mapping[str, Any]) -> ResidualModel:
    """The model with date, command, versions and scores in its provenance."""
    import sklearn

    stamp = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": COMMAND,
        "scikit_learn": sklearn.__version__,
        "numpy": np.__version__,
        "scores": scores,
    }
    return replace(model, provenance={**model.provenance, **stamp})


def fit_kinds(options: argparse.Namespace) -> str:
    """Write the artefacts of the chosen kinds; says where, and their scores."""
    lines = []
    for kind in options.kind or KINDS:
        fitted: FittedModels = import_module(f".{kind}", __package__).fit(options.data, score=options.score)
        for name, model in fitted.models.items():
            path = options.out / f"{name}.npz"
            stamped(model, fitted.scores).save(path)
            lines.append(f"{path}  {path.stat().st_size / 1000:.0f} kB\n")
        lines += [f"{kind:16s} {name:44s} {score}\n" for name, score in fitted.scores.items()]
    return "".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Command line of the fit."""
    parser = argparse.ArgumentParser(prog="python -m meshwright.fitting.operators", description=__doc__)
    parser.add_argument("data", type=Path, help="folder that holds operators/ and measured_runs/")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parents[1] / "cost_models/learned",
        help="where artefacts are written",
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="operator kinds (default: all)")
    parser.add_argument("--score", action="store_true", help="also score on rows, sizes and devices left out")
    run_command(parser, fit_kinds, arguments)


if __name__ == "__main__":
    main()
