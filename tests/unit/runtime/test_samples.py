import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.runtime.training.samples import TokenBatches, shuffled
from meshwright.schema import ConfigError


class Counting:
    """Token ``i`` of the stream is ``i``."""

    fingerprint = "counting"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def tokens(self, start: int, length: int) -> np.ndarray:
        assert 0 <= start <= start + length <= self.num_tokens
        return np.arange(start, start + length)

    def describe(self) -> str:
        return f"{self.num_tokens} tokens"


def batches(num_tokens: int, *, local_batch: int, dp_rank: int = 0, seed: int = 0) -> TokenBatches:
    return TokenBatches(
        Counting(num_tokens), seq_len=4, rows=range(dp_rank * local_batch, (dp_rank + 1) * local_batch), seed=seed
    )


@given(st.integers(1, 2000), st.integers(0, 10), st.integers(0, 3))
def test_each_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(num_samples), num_samples, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(num_samples))


def test_epochs_and_seeds_have_orders_of_their_own_far_from_the_given_one() -> None:
    orders = [shuffled(np.arange(1000), 1000, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for i, order in enumerate(orders):
        others = [np.arange(1000), *orders[:i]]
        assert all(np.mean(order == other) < 0.02 for other in others)
        assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1  # 3 standard deviations


def test_a_trillion_samples_cost_as_much_as_a_few() -> None:
    order = shuffled(np.arange(100), 10**12, seed=0, epoch=0)
    assert len(set(order.tolist())) == 100
    assert 0 <= order.min() <= order.max() < 10**12


@pytest.mark.parametrize("sizes", [(6,), (2, 3, 1), (1,) * 6, (4, 2)])
def test_an_epoch_is_every_sequence_once_whatever_the_batches(sizes: tuple[int, ...]) -> None:
    """25 tokens are six sequences of four, each with the next one's first token as its last target."""
    seen, rows = 0, []
    for size in sizes:
        rows += batches(25, local_batch=size).batch(seen).tolist()
        seen += size
    assert sorted(rows) == [list(range(start, start + 5)) for start in range(0, 24, 4)]
    assert rows == batches(25, local_batch=6).batch(0).tolist()


@pytest.mark.parametrize("dp_degree", [2, 4])
def test_ranks_share_the_global_batch_across_the_end_of_an_epoch(dp_degree: int) -> None:
    whole = batches(25, local_batch=8).batch(16).tolist()
    parts = [batches(25, local_batch=8 // dp_degree, dp_rank=rank).batch(16).tolist() for rank in range(dp_degree)]
    assert [row for part in parts for row in part] == whole


def test_token_outside_the_vocabulary_is_named() -> None:
    stream = TokenBatches(Counting(25), seq_len=4, rows=range(6), vocab_size=24)
    with pytest.raises(ConfigError, match="token id 24; the model's vocabulary has 24"):
        stream.batch(0)


def test_a_second_epoch_has_another_order() -> None:
    first, second = (batches(401, local_batch=100).batch(seen).tolist() for seen in (0, 100))
    assert first != second
    assert sorted(first) == sorted(second)
