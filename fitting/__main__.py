"""Fit what the package ships: ``python -m meshwright.fitting FIT ...``; ``--help`` lists the fits.

DATA is the folder with ``operators/`` and ``measured_runs/``. Needs scikit-learn, pandas and pyarrow (the extra ``fit``). A wrong
argument, path or table ends in one line and exit code 2.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path

from ..schema.errors import ConfigError

ARTEFACTS = Path(__file__).parents[1] / "cost_models/learned"


def build_parser() -> ArgumentParser:
    """Return the command line; the default ``report`` of each fit is its module and function ``(options) -> str``."""
    parser = ArgumentParser(prog="python -m meshwright.fitting", description=__doc__)
    fits = parser.add_subparsers(required=True, metavar="FIT")
    for name, module, function, text in (
        ("gemm", "gemm", "report", "gemm.npz: matrix products"),
        ("attention", "attention", "report", "attention.npz: fused attention"),
        ("grouped_gemm", "gemm", "report_grouped", "[grouped_gemm] of coefficients.toml: products of experts"),
    ):
        operator = fits.add_parser(name, help=text)
        operator.add_argument("data", type=Path, metavar="DATA")
        operator.add_argument("--out", type=Path, default=ARTEFACTS, help="where artefacts are written")
        operator.add_argument("--score", action="store_true", help="also score on rows, sizes and devices left out")
        operator.set_defaults(report=(module, function))
    correction = fits.add_parser("correction", help="the kernel of learned/correction.py")
    correction.set_defaults(report=("gemm", "report_correction"))
    correction.add_argument("data", type=Path, metavar="DATA")
    collectives = fits.add_parser("collectives", help="collective_curves.json")
    collectives.set_defaults(report=("collectives", "report"))
    collectives.add_argument("data", type=Path, metavar="DATA")
    collectives.add_argument("--score", action="store_true", help="errors on sizes and devices left out")
    collectives.add_argument("--write", action="store_true", help="replace collective_curves.json")
    overlap = fits.add_parser("overlap", help="[interference] and [overlap] of coefficients.toml")
    overlap.set_defaults(report=("overlap", "report"))
    overlap.add_argument("table", type=Path, help="overlap_interference.csv")
    coefficients = fits.add_parser("coefficients", help="coefficients of entire steps, from measured runs")
    coefficients.set_defaults(report=("steps", "report_coefficients"))
    coefficients.add_argument("runs", type=Path, help="table of measured runs")
    coefficients.add_argument("--names", default="", metavar="A,B", help="coefficients to search (default: all)")
    coefficients.add_argument("--cap", type=int, default=40, metavar="N", help="highest number of runs of one source")
    intervals = fits.add_parser("intervals", help="[interval] of coefficients.toml, from measured runs")
    intervals.set_defaults(report=("steps", "report_intervals"))
    intervals.add_argument("runs", type=Path, help="table of measured runs")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Write what the chosen fit reports to stdout."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    module, function = options.report
    try:
        text: str = getattr(import_module(f".{module}", __package__), function)(options)
    except ConfigError as error:
        parser.error("; ".join((error.message, *error.details)))
    except OSError as error:
        parser.error(f"cannot read {error.filename or 'the data'}: {error.strerror or error}")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
