"""Batches of documents: where documents end, what a rank takes of them, and runs that go on where they were."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.batch import with_length_costs
from meshwright.runtime.documents.packs import NOTHING, Batch, rank_batch
from meshwright.runtime.training.data_files import find_text, make_token_file, open_token_files
from meshwright.runtime.training.documents import Documents, document_ends
from meshwright.runtime.training.options import TrainOptions, prepare_options
from meshwright.schema import ConfigError, Layout, RuntimeMismatchError
from meshwright.schema.batch import LengthCosts
from meshwright.solvers.batch_groups import BatchGroup, check_batch
from meshwright.solvers.batch_groups.instance import BatchInstance
from small_jobs import losses, small_plan, train_here


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for idx, size in enumerate((40, 7, 300, 2, 90, 1, 33)):
        (folder / f"{idx}.txt").write_text("".join(chr(97 + (idx * 7 + i * i) % 26) for i in range(size)))
    return folder


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    ring=st.sampled_from([1, 2, 4]),
    ulysses=st.sampled_from([1, 2, 4]),
    multiple=st.sampled_from([1, 2, 3]),
)
def test_the_ranks_of_a_group_have_every_token_once(lengths: list[int], ring: int, ulysses: int, multiple: int) -> None:
    if sum(lengths) == len(lengths):
        lengths = [*lengths, 2]
    tokens = torch.arange(1, sum(lengths) + 1)
    size = ring * ulysses
    group = BatchGroup(size, size, tuple(range(len(lengths))), 0.0)
    batch = Batch.of(tokens, np.cumsum(lengths).tolist(), [[group]])
    parts = [
        rank_batch(batch, rank, ulysses_of=lambda _: ulysses, multiple=multiple).packs[0]
        for rank in range(size, 2 * size)
    ]
    assert len({len(part.inputs) for part in parts}) == 1
    assert all(len(part.inputs) % multiple == 0 and sum(part.lengths) == ulysses * len(part.inputs) for part in parts)
    rows = torch.cat([torch.stack((part.inputs, part.targets, part.positions)) for part in parts], dim=1)
    real = rows[:, rows[0] > 0]
    real = real[:, real[0].argsort()]
    assert real[0].tolist() == tokens.tolist()
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    assert real[2].tolist() == (np.arange(sum(lengths)) - starts).tolist()
    ends = set(np.cumsum(lengths).tolist())
    assert real[1].tolist() == [NOTHING if token in ends else token + 1 for token in range(1, sum(lengths) + 1)]
    assert (rows[1, rows[0] == 0] == NOTHING).all()


def test_groups_that_are_wrong_are_refused() -> None:
    tokens = torch.arange(10)
    with pytest.raises(ConfigError, match="document_ends must ascend"):
        Batch.of(tokens, [4, 4, 10], [])
    twice = Batch.of(tokens, [4, 10], [[BatchGroup(0, 1, (0,), 0.0), BatchGroup(1, 1, (0, 1), 0.0)]])
    with pytest.raises(ConfigError, match=r"\(C1\)"):
        rank_batch(twice, 0, ulysses_of=lambda _: 1)
    overlapping = Batch.of(tokens, [4, 10], [[BatchGroup(0, 2, (0,), 0.0), BatchGroup(1, 1, (1,), 0.0)]])
    with pytest.raises(ConfigError, match=r"\(C3\)"):
        rank_batch(overlapping, 0, ulysses_of=lambda _: 1)
    single = Batch.of(tokens[:2], [1, 2], [[BatchGroup(0, 1, (0, 1), 0.0)]])
    with pytest.raises(ConfigError, match="nothing to learn"):
        rank_batch(single, 0, ulysses_of=lambda _: 1)


def test_documents_end_with_files_where_it_is_noted_or_behind_a_token(texts: Path, tmp_path: Path) -> None:
    corpus, path = find_text([texts]), tmp_path / "corpus.bin"
    expected = [40, 47, 347, 349, 439, 440, 473]
    assert document_ends(corpus).tolist() == expected
    make_token_file(corpus, path)
    assert document_ends(open_token_files([path])).tolist() == expected
    assert document_ends(open_token_files([path, path])).tolist() == [*expected, *(473 + end for end in expected)]
    by_id = document_ends(open_token_files([path]), end_id=ord("a"))
    text = corpus.tokens(0, 473)
    assert by_id.tolist() == sorted({*(np.flatnonzero(text == ord("a")) + 1).tolist(), 473})
    noted = tmp_path / "corpus.bin.ends.npy"
    for wrong in ([10, 5, 473], [40, 472], [0, 473]):
        np.save(noted, np.array(wrong))
        with pytest.raises(ConfigError, match="must ascend from above 0 to 473"):
            document_ends(open_token_files([path]))
    noted.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="cannot read"):
        document_ends(open_token_files([path]))
    noted.unlink()
    with pytest.raises(ConfigError, match="is not beside it"):
        document_ends(open_token_files([path]))


def test_documents_are_cut_and_every_epoch_has_all_of_them(texts: Path) -> None:
    corpus = find_text([texts])
    costs = LengthCosts(
        num_ranks=2, tokens_per_rank=256, fixed_s=0.0, lengths=(1, 64), token_s=((1.0, 2.0), (0.6, 1.1))
    )
    documents = Documents(corpus, document_ends(corpus), max_len=64, per_batch=11, costs=costs)
    assert sorted(documents.lengths.tolist()) == [1, 2, 7, 26, 33, 40, 44, *[64] * 5]
    seen = []
    for step in range(12):
        batch, schedule = documents.scheduled(11 * step)
        assert check_batch(BatchInstance.under(costs, batch.lengths), schedule) == []
        seen += [bytes(batch.read(idx).tolist()) for idx in range(11)]
    text, ends = bytes(corpus.tokens(0, 473).tolist()), [0, *document_ends(corpus).tolist()]
    pieces = [
        text[begin : min(begin + 64, stop)]
        for start, stop in itertools.pairwise(ends)
        for begin in range(start, stop, 64)
    ]
    assert sorted(seen) == sorted(11 * pieces)


def test_a_run_goes_on_with_the_next_documents(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = with_length_costs(small_plan())
    options = TrainOptions(
        steps=6, learning_rate=1e-2, schedule="constant", warmup_steps=1, data=(str(texts),), documents=True
    )
    whole = train_here(monkeypatch, plan, options, tmp_path / "whole.jsonl")
    assert all(record["batch"]["num_tokens"] <= 4 * 32 for record in whole[:-1])
    assert whole[-1]["measured"]["tokens_per_s"] > 0
    first = options.replace(checkpoint_dir=str(tmp_path / "c"), checkpoint_every=4)
    train_here(monkeypatch, plan, first.replace(steps=4), tmp_path / "first.jsonl")
    rest = train_here(monkeypatch, plan, first.replace(resume=True), tmp_path / "rest.jsonl")
    assert losses(rest) == losses(whole)[4:]
    with pytest.raises(ConfigError, match="other data"):
        train_here(monkeypatch, plan, first.replace(resume=True, documents=False, steps=8), tmp_path / "other.jsonl")


def test_plans_that_documents_do_not_suit_are_refused(texts: Path) -> None:
    options = TrainOptions(data=(str(texts),), documents=True)
    with pytest.raises(ConfigError, match="does not say what documents cost"):
        prepare_options(small_plan(), options)
    with pytest.raises(RuntimeMismatchError, match="cannot be trained on documents") as caught:
        prepare_options(small_plan(Layout(pp=2, schedule="gpipe")), options)
    assert "schedule gpipe holds all micro-batches at once" in str(caught.value)
