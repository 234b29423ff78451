"""Deployments of processes: replicas, and prefill and decode instances of unlike layouts with caches sent between them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from meshwright.runtime.serving.deployment import Deployment, open_engine
from meshwright.runtime.serving.engine import ServingEngine
from meshwright.runtime.serving.requests import Request
from meshwright.runtime.serving.transfer import Place, pieces
from meshwright.schema.errors import ConfigError, MeshwrightError
from meshwright.schema.model import ModelSpec
from meshwright.schema.serving import Pool, ServingLayout
from serving_models import answers, generated, make_pool, make_prompts, save_model

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from warm_ranks import warm_ranks  # noqa: F401 - a fixture

LENGTHS = (1, 5, 17, 33, 40, 8, 3, 21)
COUNT = 10
AGG, PREFILL, DECODE = "agg", "prefill", "decode"


def pool_of(role: str, replicas: int = 1, limits: dict[str, Any] | None = None, **layout: int) -> Pool:
    pool = make_pool(layout=ServingLayout(**layout), **(limits or {}))
    return pool.model_copy(update={"role": role, "replicas": replicas})


SMALL = {"cache_blocks": 16}
CASES = [
    ("Llama", [pool_of(PREFILL), pool_of(DECODE)]),
    pytest.param("Llama", [pool_of(AGG, 2)], marks=pytest.mark.long),
    pytest.param("Llama", [pool_of(PREFILL, tp=2), pool_of(DECODE, limits=SMALL, pp=2)], marks=pytest.mark.nightly),
    pytest.param("Mixtral", [pool_of(PREFILL, 2), pool_of(DECODE, tp=2, ep=2)], marks=pytest.mark.long),
    pytest.param("DeepseekV3", [pool_of(PREFILL, tp=2), pool_of(DECODE, attention_dp=2, ep=2)], marks=pytest.mark.long),
    pytest.param("DeepseekV3", [pool_of(PREFILL, pp=2), pool_of(DECODE, tp=2)], marks=pytest.mark.nightly),
]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("family", "pools"), CASES)
def test_tokens_of_every_deployment_are_those_of_one_rank(family: str, pools: list[Pool], tmp_path: Path) -> None:
    prompts = make_prompts(LENGTHS)
    expected = generated(save_model(family, tmp_path), prompts, COUNT)
    with open_engine(tmp_path, pools) as engine:
        assert answers(engine, [Request(prompt=p, max_tokens=COUNT) for p in prompts]) == expected
        assert isinstance(engine, Deployment)
        stats = engine.stats()
        assert stats.used_blocks == 0
        assert all(t.submitted_s <= t.scheduled_s <= t.first_s <= t.last_s for t in stats.requests)
        decoders = [i for i, (pool, _) in enumerate(engine.instances) if pool.role == DECODE]
        # A decode instance computes a prompt only where it had to give up its cache.
        computed = sum(record.prefill_tokens for i in decoders for record in engine.records(i))
        assert (computed > 0) == (stats.preemptions > 0)
        assert all(engine.records(i) for i in range(len(engine.instances)))


@pytest.mark.usefixtures("warm_ranks")
def test_cancels_and_ends_leave_no_block_behind(tmp_path: Path) -> None:
    model, prompts = save_model("Llama", tmp_path), make_prompts((9, 20, 30, 12))
    with open_engine(tmp_path, [pool_of(PREFILL), pool_of(DECODE)]) as engine:
        names = [engine.submit(Request(prompt=p, max_tokens=n)) for p, n in zip(prompts, (100, 100, 1, 6), strict=True)]
        events = []
        while not {event.request for event in events if event.index == 3} >= {names[0]}:
            events += engine.step()
        engine.cancel(names[0])
        engine.cancel(names[1])
        while engine.has_work:
            events += engine.step()
        ends = {event.request: event.finish for event in events if event.finish}
        assert ends == dict(zip(names, ("cancelled", "cancelled", "length", "length"), strict=True))
        assert [event.token for event in events if event.request == names[3]] == generated(model, prompts[3:], 6)[0]
        # Another request lets every instance speak once more.
        answers(engine, [Request(prompt=prompts[0], max_tokens=4)])
        assert engine.stats().used_blocks == 0
        assert engine.stats().cancelled == 2


@pytest.mark.job
def test_a_rank_that_dies_ends_the_deployment_with_its_reason(tmp_path: Path) -> None:
    save_model("Llama", tmp_path)
    with open_engine(tmp_path, [pool_of(AGG, 2)]) as engine:
        engine.submit(Request(prompt=(1, 2, 3), max_tokens=200))
        victim = _children()[-1]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(MeshwrightError, match=r"rank \d of 2"):
            for _ in range(1000):
                engine.step(timeout_s=0.1)


@pytest.mark.job
def test_a_deployment_that_cannot_start_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    save_model("Llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ConfigError, match="cannot read"):
        open_engine(tmp_path, [pool_of(AGG, 2)])
    for _ in range(100):
        if not _children():
            return
        time.sleep(0.05)
    raise AssertionError(_children())


def _children() -> list[int]:
    """Return the serving ranks that this process has started."""
    import psutil

    return sorted(p.pid for p in psutil.Process().children(recursive=True) if "serving.worker" in " ".join(p.cmdline()))


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([pool_of(PREFILL), pool_of(AGG)], "pools of agg, prefill"),
        ([pool_of(PREFILL, 2)], "pools of prefill"),
        ([pool_of(PREFILL), pool_of(DECODE).model_copy(update={"cache": "bf16"})], "caches of unlike types"),
        ([pool_of(AGG, tp=3)], "tp 3 does not divide 4 heads"),
        ([pool_of(AGG, ep=2, tp=2)], "ep 2 without experts"),
        ([pool_of(AGG, pp=4)], "pp 4 is more than its 3 blocks"),
    ],
)
def test_pools_that_make_no_deployment_are_refused(pools: list[Pool], message: str, tmp_path: Path) -> None:
    save_model("Llama", tmp_path)
    with pytest.raises(MeshwrightError, match=message):
        open_engine(tmp_path, pools)


def test_one_device_needs_no_process(tmp_path: Path) -> None:
    save_model("Llama", tmp_path)
    with open_engine(tmp_path, pool_of(AGG)) as engine:
        assert isinstance(engine, ServingEngine)


@pytest.mark.parametrize("family", ["Llama", "DeepseekV3"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (ServingLayout(), ServingLayout(tp=2)),
        (ServingLayout(tp=2), ServingLayout()),
        (ServingLayout(tp=2, pp=2), ServingLayout(pp=3)),
        (ServingLayout(tp=2, attention_dp=2), ServingLayout(pp=2, attention_dp=3)),
    ],
)
def test_every_layer_and_head_arrives_once(
    family: str, source: ServingLayout, target: ServingLayout, tmp_path: Path
) -> None:
    save_model(family, tmp_path)
    spec = ModelSpec.from_hf(tmp_path)
    for rank in range(target.attention_dp):
        found = pieces(spec, Place(source, 0), source.attention_dp - 1, Place(target, 100), rank)
        arrived = sorted((p.target, idx, head) for p in found for idx in p.blocks for head in _heads(p.target_heads))
        heads = 1 if family == "DeepseekV3" else 2 // target.tp
        assert arrived == [
            (100 + stage * target.stage_devices + rank * target.tp + tp, idx, head)
            for stage, layers in enumerate(_stages(target.pp))
            for tp in range(target.tp)
            for idx in layers
            for head in range(heads)
        ]
        width = [
            p.source_heads.stop - p.source_heads.start == p.target_heads.stop - p.target_heads.start for p in found
        ]
        assert all(width)


def _heads(part: slice) -> Sequence[int]:
    return range(part.start, part.stop)


def _stages(pp: int) -> list[list[int]]:
    return {1: [[0, 1, 2]], 2: [[0, 1], [2]], 3: [[0], [1], [2]]}[pp]
