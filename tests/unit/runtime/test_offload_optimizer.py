"""Optimizer states away from the device: the same updates, and faults that end a run cleanly."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from meshwright.runtime.offload.copies import Copies
from meshwright.runtime.offload.optimizer import OffloadedAdamW, Placement
from meshwright.schema import ConfigError, MeshwrightError
from torch import nn

CPU = torch.device("cpu")
SHAPES = ((33, 7), (128, 65), (5,), (64, 64), (1, 3), (16, 16))
PLACES = (
    Placement("host"),
    Placement("streamed"),
    Placement(),
    Placement("streamed", is_stored=True),
    Placement("host", is_stored=True),
    Placement("own", is_stored=True),
)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(own: list[nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": [p for p in own if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in own if p.ndim == 1], "weight_decay": 0.0},
    ]


def plain(own: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(own), lr=1e-2, betas=(0.9, 0.95), fused=True)


def offloaded(own: list[nn.Parameter], folder: Path, copies: Copies | None = None) -> OffloadedAdamW:
    placements = dict(zip(own, PLACES, strict=True))
    return OffloadedAdamW(
        groups(own), placements, copies or Copies(CPU), learning_rate=1e-2, betas=(0.9, 0.95), folder=str(folder)
    )


def step(own: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in own:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def assert_same(found: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_every_place_updates_as_one_adamw_does(tmp_path: Path) -> None:
    own, others = parameters(), parameters()
    first, second = offloaded(own, tmp_path), plain(others)
    for seed in range(3):
        step(own, first, seed)
        step(others, second, seed)
    assert_same(own, others)
    for a, b in zip(own, others, strict=True):
        assert first.state[a].keys() == second.state[b].keys()
        for name, value in second.state[b].items():
            assert torch.equal(first.state[a][name], value)


def test_what_moves_is_what_the_schedule_counts(tmp_path: Path) -> None:
    own, copies = parameters(), Copies(CPU)
    optimizer = offloaded(own, tmp_path, copies)
    step(own, optimizer, 0)
    copies.traffic.take()
    step(own, optimizer, 1)
    moved = copies.traffic.take()
    sizes = [p.nbytes for p in own]
    host, streamed, stored = sizes[0] + sizes[4], sizes[1] + sizes[3], sizes[3] + sizes[4]
    assert moved.to_host_bytes == host + 2 * streamed
    assert moved.to_device_bytes == host + 2 * streamed
    assert moved.read_bytes == moved.stored_bytes == 2 * (stored + sizes[5])


def test_states_change_hands_with_one_adamw(tmp_path: Path) -> None:
    own, others = parameters(), parameters()
    first, second = offloaded(own, tmp_path), plain(others)
    step(own, first, 0)
    step(others, second, 0)
    swapped, swapped_others = parameters(), parameters()
    for target, source in ((swapped, own), (swapped_others, others)):
        for a, b in zip(target, source, strict=True):
            a.data.copy_(b.data)
    third, fourth = offloaded(swapped, tmp_path), plain(swapped_others)
    third.load_state_dict(second.state_dict())
    fourth.load_state_dict(first.state_dict())
    for seed in (1, 2):
        step(swapped, third, seed)
        step(swapped_others, fourth, seed)
        step(others, second, seed)
    assert_same(swapped, others)
    assert_same(swapped_others, others)


def test_a_parameter_changed_outside_is_seen(tmp_path: Path) -> None:
    own, others = parameters(), parameters()
    first, second = offloaded(own, tmp_path), plain(others)
    for seed in range(2):
        for parameter in (*own, *others):
            with torch.no_grad():
                parameter.mul_(0.5)
        step(own, first, seed)
        step(others, second, seed)
    assert_same(own, others)


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.usefixtures("file_size_limit")
def test_a_drive_without_space_is_found_before_the_first_step(tmp_path: Path) -> None:
    limit_files(4096)
    with pytest.raises(ConfigError, match="do not fit in"):
        offloaded(parameters(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("file_size_limit")
def test_a_drive_that_takes_no_more_ends_the_step(tmp_path: Path) -> None:
    own = parameters()
    optimizer = offloaded(own, tmp_path)
    step(own, optimizer, 0)
    limit_files(4096)
    with pytest.raises(MeshwrightError, match="cannot be read or written any more") as error:
        step(own, optimizer, 1)
    assert "--resume" in str(error.value.help)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write optimizer states to .*file"):
        offloaded(parameters(), tmp_path / "file" / "states")


def test_the_file_leaves_nothing_behind(tmp_path: Path) -> None:
    own = parameters()
    step(own, offloaded(own, tmp_path), 0)
    assert not list(tmp_path.iterdir())
