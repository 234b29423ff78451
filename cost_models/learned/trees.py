"""ResidualModel: an ensemble of regression trees as plain arrays, applied with numpy alone.

    log_residual(x) = baseline + sum over trees of the leaf that clip(x, low, high) falls into

A split sends x to the left where x <= threshold. Thresholds are kept once per feature and sorted, so that a value is looked up
once and every split compares two small integers. All trees are walked together, one level at a time. The file is a numpy archive
without pickled objects; its provenance (rows, sources, date, command, scores, versions) is JSON text inside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schema.units import FloatArray

_CHUNK_ELEMENTS = 1 << 20  # rows * trees walked at once: bounds memory, stays in cache


class Tree(NamedTuple):
    """One regression tree, node 0 the root; a leaf has ``left == -1``.

    Attributes:
        feature, threshold: of each split; left, right: child nodes; value: added by a leaf.
    """

    feature: NDArray[np.int64]
    threshold: FloatArray
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    value: FloatArray


@dataclass(frozen=True, eq=False)
class ResidualModel:
    """Trees over named, clipped features.

    Attributes:
        features: names of the columns, in order.
        low, high: trained range of each feature [d]; values outside are clipped to it.
        thresholds: sorted split points of all features, one after the other; ``offsets`` [d + 1] cuts them.
        feature, split, left, right, value: nodes of all trees; ``split`` counts within the feature's thresholds and a leaf
            is a child of itself, so that walking further does no harm.
        roots: first node of each tree; depth: longest path.
        baseline: added to the sum over trees.
        provenance: what the model was fitted on, by which command, and how it scored.
    """

    features: tuple[str, ...]
    low: FloatArray
    high: FloatArray
    thresholds: FloatArray
    offsets: NDArray[np.int64]
    feature: NDArray[np.uint8]
    split: NDArray[np.uint16]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    value: NDArray[np.float32]
    roots: NDArray[np.int64]
    depth: int
    baseline: float
    provenance: Mapping[str, Any]

    @classmethod
    def from_trees(
        cls,
        features: Sequence[str],
        low: FloatArray,
        high: FloatArray,
        trees: Sequence[Tree],
        baseline: float,
        provenance: Mapping[str, Any],
    ) -> ResidualModel:
        """Pack trees that were fitted on ``features`` within ``low`` to ``high``."""
        tables = [
            np.unique(np.concatenate([t.threshold[(t.feature == idx) & (t.left >= 0)] for t in trees]))
            for idx in range(len(features))
        ]
        offsets = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64)
        roots = np.concatenate([[0], np.cumsum([len(tree.left) for tree in trees])[:-1]]).astype(np.int64)
        packed = [_packed(tree, int(root), tables) for tree, root in zip(trees, roots, strict=True)]
        feature, split, left, right, value = (np.concatenate(column) for column in zip(*packed, strict=True))
        return cls(
            features=tuple(features),
            low=np.asarray(low, dtype=np.float64),
            high=np.asarray(high, dtype=np.float64),
            thresholds=np.concatenate(tables),
            offsets=offsets,
            feature=feature.astype(np.uint8),
            split=split.astype(np.uint16),
            left=left,
            right=right,
            value=value.astype(np.float32),
            roots=roots,
            depth=max(_depth(tree) for tree in trees),
            baseline=float(baseline),
            provenance=dict(provenance),
        )

    def log_residual(self, features: Mapping[str, FloatArray]) -> FloatArray:
        """Return the logarithm of measured over roofline seconds [N] for named feature columns [N] (others are ignored)."""
        columns = [np.asarray(features[name], dtype=np.float64) for name in self.features]
        return self.predict(np.stack(np.broadcast_arrays(*columns), axis=1))

    def predict(self, x: FloatArray) -> FloatArray:
        """Return the log-residual of a matrix [N, d] whose columns are ``features`` in order."""
        ranks = self._ranks(np.clip(x, self.low, self.high))
        step = max(1, _CHUNK_ELEMENTS // len(self.roots))
        chunks = [self._walk(ranks[start : start + step]) for start in range(0, len(ranks), step)]
        return self.baseline + (np.concatenate(chunks) if chunks else np.zeros(0))

    def _ranks(self, x: FloatArray) -> NDArray[np.int64]:
        """Return how many thresholds of its feature lie below each value [N, d]."""
        return np.stack(
            [
                np.searchsorted(self.thresholds[self.offsets[idx] : self.offsets[idx + 1]], x[:, idx], side="left")
                for idx in range(x.shape[1])
            ],
            axis=1,
        )

    def _walk(self, ranks: NDArray[np.int64]) -> FloatArray:
        num_rows, width = ranks.shape
        node = np.broadcast_to(self.roots, (num_rows, len(self.roots)))
        base = (np.arange(num_rows) * width)[:, None]
        flat = ranks.ravel()
        for _ in range(self.depth):
            goes_left = flat.take(base + self.feature.take(node)) <= self.split.take(node)
            node = np.where(goes_left, self.left.take(node), self.right.take(node))
        return np.asarray(self.value.take(node).sum(axis=1, dtype=np.float64))

    def save(self, path: Path) -> None:
        """Write a compressed numpy archive that ``read`` and ``load`` take."""
        arrays = {
            name: getattr(self, name) for name in ("low", "high", "thresholds", "offsets", "feature", "split", "value")
        }
        relative = np.repeat(self.roots, np.diff([*self.roots, len(self.left)]))
        header = {
            "features": self.features,
            "depth": self.depth,
            "baseline": self.baseline,
            "provenance": self.provenance,
        }
        np.savez_compressed(
            path,
            allow_pickle=False,
            header=np.frombuffer(json.dumps(header, sort_keys=True).encode(), dtype=np.uint8),
            roots=self.roots.astype(np.int32),
            left=(self.left - relative).astype(np.uint16),
            right=(self.right - relative).astype(np.uint16),
            **arrays,
        )

    @classmethod
    def read(cls, path: Path) -> ResidualModel:
        """Read what ``save`` wrote; the file can hold numbers and text only."""
        with np.load(path, allow_pickle=False) as stored:
            header = json.loads(stored["header"].tobytes())
            roots = stored["roots"].astype(np.int64)
            relative = np.repeat(roots, np.diff([*roots, len(stored["left"])]))
            return cls(
                features=tuple(header["features"]),
                depth=header["depth"],
                baseline=header["baseline"],
                provenance=header["provenance"],
                roots=roots,
                left=stored["left"] + relative,
                right=stored["right"] + relative,
                **{
                    name: stored[name] for name in ("low", "high", "thresholds", "offsets", "feature", "split", "value")
                },
            )

    @classmethod
    def load(cls, name: str) -> ResidualModel:
        """Return the shipped model of that name, read once."""
        return _shipped(name)


@cache
def _shipped(name: str) -> ResidualModel:
    with as_file(files(__package__).joinpath(f"{name}.npz")) as path:
        return ResidualModel.read(path)


def _packed(tree: Tree, root: int, tables: Sequence[FloatArray]) -> tuple[NDArray[Any], ...]:
    """Return the columns of one tree: thresholds become ranks, children positions among all nodes, leaves their own children."""
    is_leaf = tree.left < 0
    node = np.arange(len(tree.left))
    feature = np.where(is_leaf, 0, tree.feature)
    split = np.zeros(len(node), dtype=np.int64)
    for idx, table in enumerate(tables):
        chosen = ~is_leaf & (feature == idx)
        split[chosen] = np.searchsorted(table, tree.threshold[chosen])
    left, right = (np.where(is_leaf, node, child) + root for child in (tree.left, tree.right))
    return feature, split, left, right, np.where(is_leaf, tree.value, 0.0)


def _depth(tree: Tree) -> int:
    depth, level = 0, np.zeros(1, dtype=np.int64)
    while len(level := level[tree.left[level] >= 0]):
        level = np.concatenate([tree.left[level], tree.right[level]])
        depth += 1
    return depth
