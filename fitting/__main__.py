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
    for name, module, function, argument, text in (
        ("gemm", "gemm", "report", "data", "gemm.npz: matrix products"),
        ("attention", "attention", "report", "data", "attention.npz: fused attention"),
        (
            "decode_attention",
            "serving",
            "report_attention",
            "data",
            "decode_attention.npz: attention of rows that decode",
        ),
        ("experts", "serving", "report_experts", "data", "experts.npz: experts of serving engines"),
        ("grouped_gemm", "gemm", "report_grouped", "data", "[grouped_gemm] of coefficients.toml: products of experts"),
        ("correction", "gemm", "report_correction", "data", "the kernel of learned/calibration.py"),
        ("collectives", "collectives", "report", "data", "collective_curves.json"),
        ("all_reduce", "all_reduce", "report", "data", "[serving.all_reduce] of coefficients.toml: of serving engines"),
        ("overlap", "overlap", "report", "table", "[overlap] of coefficients.toml, from overlap_interference.csv"),
        ("coefficients", "steps", "report_coefficients", "runs", "coefficients of entire steps, from measured runs"),
        ("intervals", "intervals", "report", "runs", "[interval] of coefficients.toml, from measured runs"),
        ("engines", "engines", "report", "points", "constants of serving engines' profiles, from load tests"),
        ("hosts", "hosts", "report", "points", "the host's seconds of engines without a server, from static batches"),
        ("ratios", "ratios", "report", "runs", "[ratio.sd] of coefficients.toml, from groups of measured runs"),
    ):
        fit = fits.add_parser(name, help=text)
        fit.add_argument(argument, type=Path, metavar=argument.upper())
        fit.set_defaults(report=(module, function))
        if name in ("gemm", "attention", "decode_attention", "experts", "grouped_gemm", "collectives", "all_reduce"):
            fit.add_argument("--score", action="store_true", help="errors on rows, sizes and devices left out")
        if name in ("gemm", "attention", "decode_attention", "experts"):
            fit.add_argument("--out", type=Path, default=ARTEFACTS, help="where the artefact is written")
    fits.choices["collectives"].add_argument("--write", action="store_true", help="replace collective_curves.json")
    fits.choices["engines"].add_argument("--names", default="", metavar="A,B", help="constants to fit (default: all)")
    coefficients = fits.choices["coefficients"]
    coefficients.add_argument("--names", default="", metavar="A,B", help="coefficients to search (default: all)")
    coefficients.add_argument("--cap", type=int, default=40, metavar="N", help="highest number of runs of one source")
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
