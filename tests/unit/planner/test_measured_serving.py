"""Plans from steps that `meshwright profile --serve` measured."""

from __future__ import annotations

from itertools import product

import pytest
from meshwright.planner import plan
from meshwright.planner.serving.replay import replay
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, RequestClass, Requests, Serving
from meshwright.schema.profile import Machine, Profile, ServingHostPoint, ServingStepPoint
from meshwright.schema.requests_file import read_trace
from meshwright.schema.serving import ServingLayout

MODEL = ModelSpec.named("llama-3.1-8b")


def cluster(step_s: float, busy_factor: float = 1.0, weights: str = "bf16") -> ClusterSpec:
    """Return a node of four GPUs of which tp=1 was measured: alone, and with all of them in use."""
    case = {"model": "any", "content": MODEL.content, "layout": ServingLayout(), "weights": weights, "cache": "bf16"}
    kinds = [(rows, rows * context, 0, 0.0, 0) for rows, context in product((1, 4, 16, 64), (64, 512))]
    kinds += [(0, 0, tokens, tokens / 2, 1) for tokens in (1, 4, 16, 64, 256, 1024)]
    steps = [
        ServingStepPoint(
            **case, devices_in_use=devices, decode_rows=rows, cached_tokens=cached, prefill_tokens=tokens,
            prefill_context=context, prompts=ends, time_s=factor * (step_s + 1e-6 * (rows + tokens)),
        )
        for devices, factor in ((1, 1.0), (4, busy_factor))
        for rows, cached, tokens, context, ends in kinds
    ]  # fmt: skip
    hosts = [ServingHostPoint(**case, devices_in_use=1, rows=rows, time_s=1e-3) for rows in (1, 4)]
    named = ClusterSpec.parse("4xH100-SXM-80GB")
    profile = Profile(
        machine=Machine(device="H100", num_devices=4, host_memory_bytes=2**40, backend="nccl", torch="2", python="3"),
        created="2026-01-01", duration_s=1, memory_bandwidth_bytes_per_s=3e12, device_memory_bytes=2**36,
        serving_steps=tuple(steps), serving_host=tuple(hosts),
    )  # fmt: skip
    return named.replace(profile=profile)


def task(**changes: object) -> Serving:
    load = Requests(classes=(RequestClass(prompt_len=64, output_len=32),), rate=1.0)
    return Serving(requests=load, engine="meshwright", modes=("agg",)).replace(**changes)


def test_a_plan_takes_the_steps_that_were_measured(tmp_path):
    answer = plan(MODEL, cluster(0.02), task())
    assert [pool.layout for pool in answer.pools] == [ServingLayout()]
    # A step alone and the host's millisecond; other requests add a few microseconds a row.
    assert answer.estimate.overall.tpot.p50_s == pytest.approx(0.021, rel=0.02)
    assert answer.estimate.pools[0].step_parts_s["products"] == pytest.approx(0.02, rel=0.02)
    assert any("14 of them" in note and "measured" in note for note in answer.notes)
    assert any(note.startswith("not measured, and not planned: ") and "tp=2" in note for note in answer.notes)
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},64,32\n" for i in range(50)))
    again = replay(answer, read_trace(trace)).latencies["tpot"].p50_s
    assert again == pytest.approx(answer.estimate.overall.tpot.p50_s, rel=0.02)


def test_several_instances_have_the_steps_of_a_busy_machine():
    """One instance ends at most 64 requests in 31 steps; the rate asks for more than that."""
    load = task().requests.replace(rate=150.0)
    answer = plan(MODEL, cluster(0.02, busy_factor=2.0), task(requests=load))
    assert answer.pools[0].replicas > 1
    assert answer.estimate.overall.tpot.p50_s > 0.038


def test_what_was_not_measured_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"none of tp=2") as refused:
        plan(MODEL, cluster(0.02), task(), fixed={"tp": 2, "pp": 1})
    assert "measured: tp=1 in bf16" in refused.value.details
    with pytest.raises(ConfigError, match="in fp16") as refused:
        plan(MODEL, cluster(0.02), task(weights="fp16"))
    assert "--weights fp16" in (refused.value.help or "")


def test_other_models_and_engines_are_computed():
    for model, engine in ((ModelSpec.named("llama-3.2-1b"), "meshwright"), (MODEL, "vllm")):
        answer = plan(model, cluster(0.02), task(engine=engine))
        assert answer.estimate.overall.tpot.p50_s < 0.015
        assert not any("measured on" in note for note in answer.notes)
    assert plan(MODEL, cluster(0.02, weights="fp16"), task(cache="bf16")).pools[0].weights == "fp16"
