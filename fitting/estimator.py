"""What fits of operators share: RooflineRegressor, seconds = roofline * exp(residual(x)); relative least squares; artefacts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import sklearn
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from ..cost_models.learned.kernels import ResidualModel
from ..schema.units import FloatArray


class RooflineRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Regressor of positive times: the roofline column of X times the exponential of a residual learned on the others.

    Minimises the residual estimator's loss on log(y / roofline), so errors count as ratios. Features are clipped to the
    trained range: outside of it the answer follows the roofline only.

    Args:
        roofline_column: position of the roofline's seconds; None takes a roofline of one.
        residual: the HistGradientBoostingRegressor of the logarithm; None takes one of default settings.
    """

    def __init__(self, roofline_column: int | None = None, residual: Any = None) -> None:
        self.roofline_column = roofline_column
        self.residual = residual

    def fit(self, X: ArrayLike, y: ArrayLike) -> RooflineRegressor:  # noqa: N803
        """Fit the residual on rows X [n, d] and seconds y [n].

        Raises:
            ValueError: a time, or a time of the roofline, is not positive.
        """
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)  # noqa: N806
        if np.any(np.asarray(y) <= 0):
            raise ValueError("RooflineRegressor needs strictly positive targets: they are times")
        features, roofline = self._split(np.asarray(X))
        if np.any(roofline <= 0):
            raise ValueError("RooflineRegressor needs strictly positive roofline times")
        self.low_, self.high_ = features.min(axis=0), features.max(axis=0)
        self.residual_ = HistGradientBoostingRegressor() if self.residual is None else clone(self.residual)
        self.residual_.fit(features, np.log(np.asarray(y) / roofline))
        return self

    def predict(self, X: ArrayLike) -> FloatArray:  # noqa: N803
        """Return the seconds [n] of rows X [n, d]."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)  # noqa: N806
        features, roofline = self._split(np.asarray(X))
        log_residual = self.residual_.predict(np.clip(features, self.low_, self.high_))
        return np.asarray(roofline * np.exp(log_residual), dtype=np.float64)

    def to_model(self, names: Sequence[str], provenance: Mapping[str, Any]) -> ResidualModel:
        """Return the fitted residual as plain arrays; ``names`` are those of the columns without the roofline."""
        check_is_fitted(self)
        trees = [predictors[0].nodes for predictors in self.residual_._predictors]
        tables = [
            np.unique(np.concatenate([t["num_threshold"][(t["feature_idx"] == idx) & ~_is_leaf(t)] for t in trees]))
            for idx in range(len(names))
        ]
        roots = np.cumsum([0, *(len(tree) for tree in trees)])[:-1].astype(np.int64)
        packed = [_packed(tree, int(root), tables) for tree, root in zip(trees, roots, strict=True)]
        feature, split, left, right, value = (np.concatenate(column) for column in zip(*packed, strict=True))
        return ResidualModel(
            features=tuple(names),
            low=self.low_,
            high=self.high_,
            thresholds=np.concatenate(tables),
            offsets=np.cumsum([0, *(len(table) for table in tables)]).astype(np.int64),
            feature=feature.astype(np.uint8),
            split=split.astype(np.uint16),
            left=left,
            right=right,
            value=value.astype(np.float32),
            roots=roots,
            depth=max(int(tree["depth"].max()) for tree in trees),
            baseline=float(np.squeeze(self.residual_._baseline_prediction)),
            provenance=dict(provenance),
        )

    def _split(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return features and roofline seconds."""
        if self.roofline_column is None:
            return x, np.ones(len(x))
        return np.delete(x, self.roofline_column, axis=1), x[:, self.roofline_column]

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


def _is_leaf(tree: NDArray[Any]) -> NDArray[np.bool_]:
    return tree["is_leaf"].astype(bool)


def _packed(tree: NDArray[Any], root: int, tables: Sequence[FloatArray]) -> tuple[NDArray[Any], ...]:
    """Return feature, split, left, right and value of scikit-learn's nodes as `ResidualModel` has them."""
    is_leaf, node = _is_leaf(tree), np.arange(len(tree))
    feature = np.where(is_leaf, 0, tree["feature_idx"].astype(np.int64))
    split = np.zeros(len(node), dtype=np.int64)
    for idx, table in enumerate(tables):
        chosen = ~is_leaf & (feature == idx)
        split[chosen] = np.searchsorted(table, tree["num_threshold"][chosen])
    left, right = (np.where(is_leaf, node, tree[side].astype(np.int64)) + root for side in ("left", "right"))
    return feature, split, left, right, np.where(is_leaf, tree["value"], 0.0)


def save_model(model: ResidualModel, path: Path) -> None:
    """Write a compressed numpy archive that `ResidualModel.read` takes."""
    arrays = ("low", "high", "thresholds", "offsets", "feature", "split", "value")
    first = np.repeat(model.roots, np.diff([*model.roots, len(model.left)]))
    header = {name: getattr(model, name) for name in ("features", "depth", "baseline", "provenance")}
    np.savez_compressed(
        path,
        allow_pickle=False,
        header=np.frombuffer(json.dumps(header, sort_keys=True).encode(), dtype=np.uint8),
        roots=model.roots.astype(np.int32),
        left=(model.left - first).astype(np.uint16),
        right=(model.right - first).astype(np.uint16),
        **{name: getattr(model, name) for name in arrays},
    )


def fit_residual(features: FloatArray, roofline: FloatArray, seconds: FloatArray, **settings: Any) -> RooflineRegressor:
    """Fit trees of these settings on features [n, d], rooflines [n] and seconds [n]; column 0 of the regressor is the roofline."""
    trees = HistGradientBoostingRegressor(min_samples_leaf=40, random_state=0, **settings)
    regressor = RooflineRegressor(roofline_column=0, residual=trees)
    return regressor.fit(np.column_stack([roofline, features]), seconds)


def percent_error(predicted: FloatArray, measured: ArrayLike) -> float:
    """Return the mean absolute error in percent of the measured times."""
    return float(100 * np.mean(np.abs(predicted / np.asarray(measured) - 1)))


def key_values(keys: pd.Series, names: Iterable[str]) -> list[FloatArray]:
    """Return the numbers of each name in texts such as ``m=128, n=256``."""
    return [keys.str.extract(rf"\b{name}=(\d+)")[0].to_numpy(dtype=float) for name in names]


def least_relative_squares(
    columns: FloatArray, seconds: FloatArray, prior: FloatArray | None = None, weight: float = 0.05
) -> FloatArray:
    """Return non-negative coefficients of least squared relative error, drawn towards a prior by ``weight`` rows each."""
    rows, target = columns / seconds[:, None], np.ones(len(seconds))
    if prior is not None:
        pull = np.sqrt(weight) / np.maximum(prior, [5e-7, 0.05, 0.05, 0.05, 0.05])
        rows, target = np.vstack([rows, np.diag(pull)]), np.concatenate([target, pull * prior])
    return np.asarray(nnls(rows, target)[0])


def write_artefact(model: ResidualModel, folder: Path, name: str, scores: Mapping[str, Any]) -> str:
    """Save ``NAME.npz`` with date, command, versions and scores in its provenance; return the lines of a report."""
    stamp = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python -m meshwright.fitting {name} DATA --score",
        "scikit_learn": sklearn.__version__,
        "numpy": np.__version__,
        "scores": scores,
    }
    path = folder / f"{name}.npz"
    save_model(replace(model, provenance={**model.provenance, **stamp}), path)
    return f"{path}  {path.stat().st_size / 1000:.0f} kB\n" + score_lines(name, scores)


def score_lines(name: str, scores: Mapping[str, Any]) -> str:
    """Return a line for each thing that was left out."""
    return "".join(f"{name:16s} {left_out:44s} {score}\n" for left_out, score in scores.items())
