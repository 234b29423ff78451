"""Samples that several chains of a model compute: text by a decoder, the patches of their images by an encoder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cli.main import app
from meshwright.planner.batch import batch_instance
from meshwright.schema import ConfigError, InfeasibleError
from meshwright.schema.batch import Batch, BatchPart, SequenceCosts
from meshwright.solvers.batch_groups import BatchInstance, check_batch, lower_bound_s, schedule_batch
from test_batch_groups import _Enumeration
from typer.testing import CliRunner

TEXT = SequenceCosts(linear_s=1.8e-4, quadratic_s=5e-9, exchange_s={2: 1.7e-5, 8: 1e-4}, fixed_s=0.3)
IMAGES = SequenceCosts(linear_s=6e-5, quadratic_s=9e-9, exchange_s={2: 6e-6}, fixed_s=0.1)


def _batch(tokens: list[int], patches: list[int], *, ranks: int, per_rank: int) -> Batch:
    part = BatchPart(name="images", lengths=tuple(patches), costs=IMAGES, token_ratio=0.25)
    return Batch(lengths=tuple(tokens), num_ranks=ranks, tokens_per_rank=per_rank, costs=TEXT, parts=(part,))


def _mixed(seed: int, size: int) -> tuple[list[int], list[int]]:
    """Half of the samples have images, whose patches say nothing of the tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.minimum(rng.lognormal(6.5, 1.2, size) + 1, 20_000).astype(int)
    patches = rng.integers(256, 16_000, size) * rng.integers(0, 2, size)
    return tokens.tolist(), patches.tolist()


def test_seconds_and_memory_are_sums_over_the_parts() -> None:
    instance = batch_instance(_batch([1_000, 1_000, 400], [0, 4_001, 0], ranks=2, per_rank=4_000))
    assert instance.lengths.tolist() == [1_000, 2_001, 400]
    tokens, patches = np.array([1_000.0, 1_000, 400]), np.array([0.0, 4_001, 0])
    for column, degree in enumerate(instance.degrees):
        expected = TEXT.seconds(tokens, degree) + IMAGES.seconds(patches, degree)
        assert instance.seconds[:, column] == pytest.approx(expected)
    assert instance.fixed_s == pytest.approx(0.4)
    # Two of the same memory, one of text and one of images, are not alike.
    text = Batch(lengths=(1_000, 500), num_ranks=1, tokens_per_rank=4_000, costs=TEXT)
    both = text.replace(parts=(BatchPart(lengths=(0, 2_000), costs=IMAGES, token_ratio=0.25),))
    assert batch_instance(both).lengths.tolist() == [1_000, 1_000]
    assert len(batch_instance(both).alike[0]) == 2


@pytest.mark.parametrize("seed", range(12))
def test_few_samples_are_scheduled_as_by_brute_force(seed: int) -> None:
    tokens, patches = _mixed(seed, 2 + seed % 3)
    instance = batch_instance(_batch(tokens, patches, ranks=4, per_rank=8_000))
    for each in (instance, replace(instance, waits=False)):
        brute = _Enumeration(each)
        answer = schedule_batch(each)
        assert check_batch(each, answer) == []
        assert answer.seconds == pytest.approx(brute.waiting_s() if each.waits else brute.meeting_once_s(), rel=1e-9)
        assert lower_bound_s(each) <= answer.seconds * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(
    samples=st.lists(st.tuples(st.integers(1, 30_000), st.integers(0, 60_000)), min_size=1, max_size=60),
    ranks=st.sampled_from([1, 2, 8, 16]),
    waits=st.booleans(),
)
def test_every_schedule_keeps_the_constraints(samples: list[tuple[int, int]], ranks: int, waits: bool) -> None:
    tokens, patches = (list(each) for each in zip(*samples, strict=True))
    batch = _batch(tokens, patches, ranks=ranks, per_rank=12_000)
    if max(t + -(-p // 4) for t, p in samples) > 12_000 * ranks:
        with pytest.raises(InfeasibleError, match=r"\(C2\)"):
            batch_instance(batch)
        return
    instance = replace(batch_instance(batch), waits=waits)
    answer = schedule_batch(instance)
    assert check_batch(instance, answer) == []
    assert lower_bound_s(instance) <= answer.seconds * (1 + 1e-9)


def _by_tokens_alone(batch: Batch, instance: BatchInstance) -> float:
    """The seconds of the schedule that text alone would have; patches count for memory only."""
    blind = replace(
        instance, seconds=np.stack([TEXT.seconds(np.array(batch.lengths, float), d) for d in instance.degrees], axis=1)
    )
    return instance.step_s(schedule_batch(blind).micro_batches)


def test_mixed_samples_are_near_the_bound_and_faster_than_by_tokens_alone() -> None:
    for seed in range(3):
        batch = _batch(*_mixed(seed, 256), ranks=16, per_rank=8_000)
        instance = batch_instance(batch)
        answer = schedule_batch(instance)
        assert check_batch(instance, answer) == []
        assert answer.seconds <= 1.1 * answer.bound_seconds
        assert answer.seconds <= 0.9 * _by_tokens_alone(batch, instance)


def test_the_command_reads_parts(tmp_path: Path) -> None:
    path = tmp_path / "batch.json"
    batch = _batch([512, 4_096, 700], [0, 1_024, 2_000], ranks=2, per_rank=4_096)
    path.write_text(batch.model_dump_json())
    result = CliRunner().invoke(app, ["batch", str(path), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert sorted(idx for m in answer["micro_batches"] for g in m for idx in g["sequences"]) == [0, 1, 2]
    document = json.loads(batch.model_dump_json())
    document["parts"][0]["lengths"].pop()
    path.write_text(json.dumps(document))
    result = CliRunner().invoke(app, ["batch", str(path)])
    assert result.exit_code == 2
    assert "parts[0] has 2 lengths for 3 sequences" in result.output
    with pytest.raises(ConfigError):
        BatchPart(lengths=(-1,), costs=IMAGES)
