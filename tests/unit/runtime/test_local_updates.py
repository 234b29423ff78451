"""Islands that train by themselves between sums: exactness, what is sent, and going on from checkpoints."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import rank_with_faults
import torch
import torch.distributed as dist
from meshwright.runtime import parallelize
from meshwright.runtime.job import machine
from meshwright.runtime.job.launch import launch
from meshwright.runtime.job.rendezvous import Rendezvous
from meshwright.runtime.job.run import write_event
from meshwright.runtime.job.worker import Job
from meshwright.runtime.training.islands import Pace
from meshwright.runtime.training.options import TrainOptions, list_checkpoints, require_local
from meshwright.runtime.training.ring import Ring, decode, encode
from meshwright.runtime.training.ring_links import meet_in_ring
from meshwright.schema import ClusterSpec, Layout, MeshwrightError, RuntimeMismatchError, TrainingPlan, Workload
from meshwright.schema.local_updates import ROW, Island, LocalUpdates, WireBits, plan_of_island, wire_bytes
from plans import make_plan, tiny_model
from safetensors.torch import load_file
from small_jobs import losses, read_lines, train_here
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

WORKLOAD = Workload(seq_len=32, global_batch_size=6, precision="fp32", optimizer="sgd")
PLAIN = TrainOptions(
    steps=6,
    learning_rate=0.05,
    schedule="constant",
    warmup_steps=1,
    max_grad_norm=1e9,
    outer_learning_rate=1.0,
    outer_momentum=0.0,
)


def islands_plan(
    layout: Layout, ranks: tuple[int, ...], sequences: tuple[int, ...], *, vocab_size: int = 256, **updates: Any
) -> TrainingPlan:
    """A plan whose islands have so many ranks, replicas of what the rest of the layout says."""
    plan = make_plan(tiny_model(num_blocks=2, vocab_size=vocab_size, tied=True), layout, workload=WORKLOAD)
    cluster, each = plan.cluster, layout.world_size // layout.dp_replicate
    node, link = cluster.groups[0], cluster.levels[0]
    levels = (link.replace(domain_size=size) for size in ranks)
    groups = [
        node.replace(zone=f"r{i}", devices_per_node=size, levels=(level,))
        for i, (size, level) in enumerate(zip(ranks, levels, strict=True))
    ]
    return plan.replace(
        cluster=ClusterSpec(name="regions", groups=tuple(groups), levels=cluster.levels, reserved_bytes=cluster.reserved_bytes),
        shares=tuple(
            count * layout.tp // size for count, size in zip(sequences, ranks, strict=True) for _ in range(size // layout.tp)
        ),
        local_updates=LocalUpdates(
            islands=tuple(
                Island(region=f"r{i}", replicas=size // each, sequences=count, step_s=1.0)
                for i, (size, count) in enumerate(zip(ranks, sequences, strict=True))
            ),
            ring=tuple(range(len(ranks))), exchange_s=0.1, waited_s=0.1, sent_bytes=1.0, **updates,
        ),
    )  # fmt: skip


class Islands:
    """A job whose islands are nodes with launchers of their own, threads of this process; ranks are forked.

    Attributes:
        errors: what launchers ended with, by island; nothing where they ended well.
    """

    def __init__(self, folder: Path, plan: TrainingPlan, options: TrainOptions, **job: Any) -> None:
        folder.mkdir(exist_ok=True)
        plan.save(folder / "plan.json")
        self.folder, self.errors = folder, dict[int, MeshwrightError]()
        self._plan, self._options, self._job, self._threads = plan, options, job, dict[int, threading.Thread]()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, island: int) -> None:
        """Start the launcher of an island, for the first time or again."""
        self._threads[island] = threading.Thread(target=self._launch, args=(island,))
        self._threads[island].start()

    def wait(self, island: int) -> None:
        """Wait for a launcher's end."""
        self._threads[island].join()

    def start_all(self) -> None:
        """Start the launchers of all islands."""
        for island in range(len(self._plan.cluster.groups)):
            self.start(island)

    def wait_all(self) -> None:
        """Wait for the good end of all launchers."""
        for island in range(len(self._plan.cluster.groups)):
            self.wait(island)
        assert not self.errors, self.errors

    def records(self, island: int) -> list[dict[str, Any]]:
        """What an island has reported."""
        return read_lines(self.folder / f"report-{island}")

    def _launch(self, island: int) -> None:
        nodes = len(self._plan.cluster.groups)
        job = Job(
            plan=str(self.folder / "plan.json"), options=self._options, report=str(self.folder / f"report-{island}"),
            timeout_s=60.0, regions="continue", hang_timeout_s=0.0, **self._job,  # tests hold ranks until others are back
        )  # fmt: skip
        place = Rendezvous(nnodes=nodes, node_rank=island, endpoint=self._endpoint, secret=b"s" * 16, timeout_s=60)
        try:
            launch(self._plan, job, rendezvous=place, on_event=lambda event: write_event(job, event))
        except MeshwrightError as error:
            self.errors[island] = error


def train_islands(folder: Path, plan: TrainingPlan, options: TrainOptions) -> list[dict[str, Any]]:
    """Train with all ranks on this machine; what the first island reports."""
    islands = Islands(folder, plan, options)
    islands.start_all()
    islands.wait_all()
    return [record for record in islands.records(0) if "event" not in record]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*.safetensors")))


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("layout", "ranks", "sequences"),
    [
        pytest.param(Layout(dp_replicate=2), (1, 1), (2, 4), marks=pytest.mark.long),
        (Layout(dp_replicate=3), (2, 1), (4, 2)),
        pytest.param(Layout(dp_replicate=2, dp_shard=2, zero_stage=3), (2, 2), (2, 4), marks=pytest.mark.long),
    ],
)
def test_sums_after_each_step_without_momentum_are_those_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout, ranks: tuple[int, ...], sequences: tuple[int, ...]
) -> None:
    """The mean over islands, weighted by their sequences, of SGD's steps is the step of the mean gradient."""
    one = make_plan(tiny_model(num_blocks=2, vocab_size=256, tied=True), Layout(), workload=WORKLOAD)
    train_here(monkeypatch, one, PLAIN.replace(save_weights=str(tmp_path / "one")), tmp_path / "one.jsonl")
    dist.destroy_process_group() if dist.is_initialized() else None
    plan = islands_plan(layout, ranks, sequences, steps=1)
    train_islands(tmp_path / "job", plan, PLAIN.replace(save_weights=str(tmp_path / "islands")))
    expected, reached = weights(tmp_path / "one"), weights(tmp_path / "islands")
    assert expected.keys() == reached.keys()
    for name, value in expected.items():
        torch.testing.assert_close(reached[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("bits", "delay"), [(8, 0), pytest.param(32, 1, marks=pytest.mark.long)])
def test_a_run_that_goes_on_is_the_run_without_a_stop(tmp_path: Path, bits: WireBits, delay: int) -> None:
    plan = islands_plan(Layout(dp_replicate=2), (1, 1), (3, 3), steps=4, fragments=2, bits=bits, delay_steps=delay)
    options = PLAIN.replace(steps=8, outer_learning_rate=0.7, outer_momentum=0.9, checkpoint_every=3)
    entire = options.replace(checkpoint_dir=str(tmp_path / "a"), save_weights=str(tmp_path / "entire"))
    expected = losses(train_islands(tmp_path / "first", plan, entire))
    for island in ("island-0", "island-1"):
        last = list_checkpoints(tmp_path / "a" / island)[-1]
        last.rename(last.with_name(f"aside-{last.name}"))
    again = entire.replace(resume=True, save_weights=str(tmp_path / "again"))
    records = [record for record in train_islands(tmp_path / "second", plan, again) if "step" in record]
    assert records[0]["step"] > 3
    assert losses(records) == expected[-len(records) :]
    expected_weights, reached = weights(tmp_path / "entire"), weights(tmp_path / "again")
    assert all(torch.equal(reached[name], value) for name, value in expected_weights.items())


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param(Layout(dp_replicate=3), (1, 1, 1), marks=pytest.mark.long),
        pytest.param(Layout(dp_replicate=4, tp=2), (4, 2, 2), marks=pytest.mark.long),  # the first has a replica more
    ],
)
def test_an_island_that_is_killed_and_back_ends_with_the_parameters_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout, ranks: tuple[int, ...]
) -> None:
    """One of its ranks is killed between sums 2 and 3; once it is back the others let it in, at sum 6 of 10 at the latest."""
    killed = ranks[0] + ranks[1] - 1
    faults = dies_in_step_5(killed, tmp_path, monkeypatch)
    monkeypatch.setattr(machine, "num_cores", lambda: 4)
    plan = islands_plan(layout, ranks, (2, 2, 2), steps=2, bits=8)
    options = PLAIN.replace(
        steps=20, outer_learning_rate=0.7, outer_momentum=0.9, checkpoint_dir=str(tmp_path / "c"), checkpoint_every=20
    )
    islands = Islands(tmp_path / "job", plan, options)
    islands.start_all()
    islands.wait(1)
    assert f"rank {killed} of {sum(ranks)} was killed" in str(islands.errors.pop(1))
    islands.start(1)
    take_in(faults, range(ranks[0], killed + 1), sum(ranks))
    islands.wait_all()
    steps = [[record["step"] for record in islands.records(island) if "step" in record] for island in range(3)]
    assert steps[0] == steps[2] == list(range(1, 21))
    assert steps[1] == [1, 2, 3, 4, *range(steps[1][4], 21)] and steps[1][4] in (7, 9, 11, 13)
    assert losses(islands.records(0))[-1] < losses(islands.records(0))[0]
    lost = [record["ranks"] for record in islands.records(2) if record.get("event") == "lost"]
    assert lost == [list(range(ranks[0], killed + 1))]
    assert any(name.startswith("islands.momentum.") for name in require_equal_islands(tmp_path / "c"))


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_the_island_with_the_store_is_back_when_its_rank_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = dies_in_step_5(0, tmp_path, monkeypatch)
    plan = islands_plan(Layout(dp_replicate=3), (1, 1, 1), (2, 2, 2), steps=2)
    options = PLAIN.replace(steps=20, checkpoint_dir=str(tmp_path / "c"), checkpoint_every=20)
    islands = Islands(tmp_path / "job", plan, options, restart_ranks=1)
    islands.start_all()
    take_in(faults, [0], 3)
    islands.wait_all()
    require_equal_islands(tmp_path / "c")


def dies_in_step_5(rank: int, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Let a rank kill itself in step 5, and all others wait at step 11; the folder of faults."""
    faults = folder / "faults"
    faults.mkdir()
    for name in (f"die-5-{rank}", "stop-11"):
        (faults / name).touch()
    rank_with_faults.use(faults, patch)
    return faults


def take_in(faults: Path, back: Iterable[int], size: int) -> None:
    """Once the ranks that are back wait, and all others at step 11, let those go on and take the former in."""
    names = {f"at-11-{rank}" for rank in set(range(size)) - set(back)} | {f"waits-{rank}" for rank in back}
    while not names <= {path.name for path in faults.iterdir()}:
        time.sleep(0.01)
    (faults / "takes-in").touch()
    (faults / "stop-11").unlink()


def require_equal_islands(folder: Path) -> dict[str, torch.Tensor]:
    """Three islands have stored the same tensors, to the last bit; which."""
    first, *others = (stored_tensors(folder / f"island-{island}") for island in range(3))
    for name, value in first.items():
        assert all(torch.equal(other[name], value) for other in others), name
    return first


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters, anchors and their momenta of the last checkpoint, by name."""
    last = list_checkpoints(folder)[-1]
    dcp_to_torch_save(last, folder / "all.pt")
    states = torch.load(folder / "all.pt", weights_only=True)
    parts = {kind: states[kind] for kind in ("model", "islands")}
    return {f"{kind}.{name}": value for kind, tensors in parts.items() for name, value in tensors.items()}


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_sums_as_often_as_the_option_says_send_what_the_plan_says(tmp_path: Path) -> None:
    """Two sums in six steps, and one at the end; norms and biases go in fp32, which a large embedding outweighs."""
    plan = islands_plan(Layout(dp_replicate=2), (1, 1), (3, 3), vocab_size=32768, steps=2, bits=8)
    summary = train_islands(tmp_path / "job", plan, PLAIN.replace(sync_every=3))[-1]
    num_sums = 6 // 3
    assert summary["measured"]["sent_bytes"] == pytest.approx(num_sums * wire_bytes(plan.model.num_params, 8), rel=0.1)


def test_a_slower_link_makes_sums_seldom_and_a_faster_one_as_planned(tmp_path: Path) -> None:
    updates = islands_plan(Layout(dp_replicate=2), (1, 1), (3, 3), steps=6, fragments=2).local_updates
    assert updates is not None and updates.exchange_s == 0.1
    pace = Pace(updates, adapts=True)
    begun = []
    for step in range(1, 80):
        if pace.is_due(step):
            begun.append((step, pace.begin(step) % 2))
            pace.follow(1.0 if 6 <= step < 30 else 0.1)  # a tenth of the rate for a while
    assert [step for step, _ in begun] == [3, 6, 36, 39, 42, 45, 48, 51, 54, 57, 60, 63, 66, 69, 72, 75, 78]
    assert [fragment for _, fragment in begun] == [k % 2 for k in range(len(begun))]
    pace.follow(1e9)
    assert pace.every == updates.limits.max_local_steps // 2
    fixed = Pace(updates, adapts=False)
    fixed.follow(1e9)
    assert fixed.every == 3
    late = Pace(updates, adapts=True)
    assert not late.is_due(8) and late.is_due(9) and late.begin(9) == 2


@pytest.mark.usefixtures("warm_ranks")
def test_sums_that_take_longer_than_planned_become_seldom(tmp_path: Path) -> None:
    plan = islands_plan(Layout(dp_replicate=2), (1, 1), (3, 3), steps=2, bits=8)
    assert plan.local_updates is not None
    plan = plan.replace(local_updates=plan.local_updates.replace(exchange_s=1e-9))
    summary = train_islands(tmp_path / "job", plan, PLAIN.replace(sync_every="auto"))[-1]
    assert summary["measured"]["sync_every"] == plan.local_updates.limits.max_local_steps


def in_threads(size: int, bits: WireBits, values: list[torch.Tensor]) -> list[tuple[torch.Tensor, float, int]]:
    """What each member of a ring has at the end: the sum, the largest number, and the bytes it sent."""
    store, results = dist.HashStore(), dict[int, tuple[torch.Tensor, float, int]]()

    def member(position: int) -> None:
        links, _ = meet_in_ring(store, "ring", range(size), position, timeout_s=30.0)
        ring = Ring(links, position, size)
        summed = ring.sum(values[position], bits)
        results[position] = summed, ring.maximum(float(position == 1)), ring.sent_bytes

    threads = [threading.Thread(target=member, args=(position,)) for position in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[position] for position in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("bits", "error"), [(32, 1e-6), (16, 1e-3), (8, 1 / 127)])
def test_all_members_of_a_ring_have_the_same_sum(size: int, bits: WireBits, error: float) -> None:
    values = [torch.randn(size * 3 * ROW - 5, generator=torch.Generator().manual_seed(i)) for i in range(size)]
    members = in_threads(size, bits, values)
    exact = torch.stack(values).sum(dim=0)
    assert all(torch.equal(summed, members[0][0]) and most == 1.0 for summed, most, _ in members)
    torch.testing.assert_close(members[0][0], exact, rtol=0, atol=error * size * float(exact.abs().max()))
    numbers = {32: 4 * ROW, 16: 2 * ROW, 8: ROW + 4}[bits]
    assert members[0][2] == 2 * (size - 1) * 3 * numbers + (size - 1) * 4


def test_rows_round_to_half_a_step_and_keep_zeros() -> None:
    values = torch.randn(4 * ROW, generator=torch.Generator().manual_seed(0))
    values[:ROW] = 0
    decoded = decode(encode(values, 8), 8)
    steps = values.view(4, ROW).abs().amax(dim=1, keepdim=True) / 127
    assert torch.all((decoded - values).view(4, ROW).abs() <= steps / 2 * (1 + 1e-5))
    assert torch.equal(decoded[:ROW], values[:ROW])


def test_what_does_not_go_with_local_updates_is_refused() -> None:
    plan = islands_plan(Layout(dp_replicate=2), (1, 1), (3, 3), steps=2)
    with pytest.raises(RuntimeMismatchError, match="do not suit") as error:
        require_local(plan, TrainOptions(documents=True, checkpoint_every="auto", checkpoint_dir="c"))
    assert len(error.value.details) == 2
    with pytest.raises(RuntimeMismatchError, match="each step"):
        require_local(make_plan(tiny_model(), Layout(), workload=WORKLOAD), TrainOptions(sync_every=4))


def test_scripts_of_users_do_not_ignore_local_updates() -> None:
    plan = islands_plan(Layout(dp_replicate=2), (1, 1), (3, 3), steps=2)
    assert plan.why_not_applied() == ()
    assert "built-in training" in plan.why_not_applied(is_user_model=True)[0]
    with pytest.raises(RuntimeMismatchError, match="train by themselves"):
        parallelize(None, plan)
    assert plan.model == plan_of_island(plan, 1).model and plan_of_island(plan, 1).layout.world_size == 1
