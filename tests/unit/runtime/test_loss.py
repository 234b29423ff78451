"""The loss against torch's, in value, gradient and memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from meshwright.runtime import loss as loss_module
from meshwright.runtime.loss import cross_entropy


@pytest.mark.parametrize("chunk_elements", [1, 300, 2**24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_torch(
    dtype: torch.dtype, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    source = (torch.randn(2, 9, 101) * 4).to(dtype)
    targets = torch.randint(0, 101, (2, 9))
    ours, theirs = source.clone().requires_grad_(), source.clone().requires_grad_()
    value = cross_entropy(ours * 1, targets)
    value.sum().mul(3.0).backward()
    expected = F.cross_entropy(theirs.float().flatten(0, 1), targets.flatten())
    expected.mul(3.0).backward()
    assert value.shape == (1,)
    torch.testing.assert_close(value[0], expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradient_is_written_over_the_logits() -> None:
    source = torch.randn(4, 11, requires_grad=True)
    logits = source * 1
    storage = logits.data_ptr()
    seen: list[int] = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    cross_entropy(logits, torch.tensor([1, 2, 3, 4])).backward()
    assert seen == [storage]


def test_second_backward_is_refused() -> None:
    logits = torch.randn(4, 11, requires_grad=True) * 1
    value = cross_entropy(logits, torch.tensor([1, 2, 3, 4]))
    value.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="overwritten"):
        value.backward()


def test_large_logits_stay_finite() -> None:
    logits = torch.full((2, 5), -1e4).index_fill(1, torch.tensor([3]), 1e4).requires_grad_()
    value = cross_entropy(logits * 1, torch.tensor([3, 0]))
    assert torch.isfinite(value).all()
    assert value.item() == pytest.approx(1e4)
