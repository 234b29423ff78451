from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.measured_steps import MeasuredEngine, MeasuredSteps
from meshwright.cost_models.serving.simulation import EnginePool, RequestTable, simulate
from meshwright.schema import ModelSpec, Profile
from meshwright.schema.errors import ConfigError
from meshwright.schema.profile import Machine, ServingHostPoint, ServingStepPoint
from meshwright.schema.serving import EngineLimits, ServingLayout

KINDS = np.array(
    [(rows, rows * context, 0, 0, 0) for rows, context in product((1, 4, 8, 16, 64), (32, 128, 512))]
    + [(0, 0, tokens, start + tokens / 2, 1) for tokens, start in product((1, 4, 8, 16, 64, 256), (0, 256))]
    + [(0, 0, prompts * tokens, tokens / 2, prompts) for prompts, tokens in ((2, 4), (4, 16), (2, 128))]
    + [(4, 400, 4, 30, 1), (8, 3000, 8, 60, 1), (8, 2000, 56, 60, 0), (16, 900, 240, 60, 1)]
).T
positive = st.floats(1e-3, 1e3)


def _seconds(
    kinds: np.ndarray, fixed: float, row: float, head: float, cached: float, pair: float, step: float = 0.0
) -> np.ndarray:
    decoding, stored, tokens, context, ending = kinds
    body = fixed + row * (decoding + tokens) + head * (decoding + ending)
    decode = (decoding > 0) * (step + 0.5 * row * decoding + cached * stored)
    return 1e-6 * (body + decode + (tokens > 0) * (2 * step + pair * tokens * context))


@given(st.tuples(positive, positive, positive, positive, positive, positive))
def test_steps_that_follow_the_formula_are_predicted_where_nothing_was_measured(terms: tuple[float, ...]) -> None:
    fit = MeasuredSteps.fit(*KINDS, _seconds(KINDS, *terms))
    assert fit.error < 1e-6
    assert fit.num_measured == KINDS.shape[1]
    others = np.array([(6, 300, 0, 0, 0), (6, 100, 30, 40, 1), (0, 0, 100, 300, 1)]).T
    # Rows between two that were measured: the curve is linear there, as the formula is.
    assert fit.seconds(*others[:4], prompts=others[4]) == pytest.approx(_seconds(others, *terms), rel=1e-3)


def test_no_part_is_negative_and_more_rows_are_never_faster() -> None:
    noise = np.random.default_rng(0).uniform(0.5, 1.5, KINDS.shape[1])
    fit = MeasuredSteps.fit(*KINDS, _seconds(KINDS, 50, 2, 1, 0.01, 0.001) * noise)
    rows = np.arange(0, 2000)
    parts = fit.parts(rows, rows * 100)
    assert all((part >= 0).all() for part in parts.values())
    assert (np.diff(parts["products"]) >= 0).all()
    assert parts["products"][0] == 0


def test_a_simulation_takes_measured_steps() -> None:
    """One request alone: its prompt's step and a step for each further token."""
    fit = MeasuredSteps.fit(*KINDS, _seconds(KINDS, 1000, 10, 5, 0, 0))
    limits = EngineLimits(max_batch=8, max_batched_tokens=256, chunk=256, cache_blocks=100)
    profile = EngineProfile.named("meshwright")
    simulated = simulate(EnginePool.of(fit, profile, limits), RequestTable.of([64], [11]))
    overhead = profile.overhead.step_s + profile.overhead.row_s
    assert simulated.tpot_s[0] == pytest.approx(1020e-6 + overhead, rel=1e-3)


@pytest.mark.parametrize("seconds", [[1.0] * 3, [0.0] * 10, [float("nan")] * 10])
def test_what_is_no_measurement_is_refused(seconds: list[float]) -> None:
    columns = [np.ones(len(seconds))] * 5
    with pytest.raises(ConfigError, match="no measurement of an engine"):
        MeasuredSteps.fit(*columns, seconds)


def _profile(**cases: tuple[int, float]) -> Profile:
    """Return a profile with steps of llama-3.2-1b: by devices in use, and how much longer than a formula's they took."""
    model = ModelSpec.named("llama-3.2-1b")
    same = {
        "model": model.name,
        "content": model.content,
        "layout": ServingLayout(),
        "weights": "fp32",
        "cache": "fp32",
    }
    names = ("decode_rows", "cached_tokens", "prefill_tokens", "prefill_context", "prompts", "time_s")
    seconds = _seconds(KINDS, 1000, 10, 5, 0.01, 0.001)
    steps = [
        ServingStepPoint(**same, devices_in_use=devices, **dict(zip(names, map(float, column), strict=True)))
        for devices, factor in cases.values()
        for column in np.vstack([KINDS, factor * seconds]).T
    ]
    hosts = [ServingHostPoint(**same, devices_in_use=1, rows=rows, time_s=2e-4 + 1e-5 * rows) for rows in (1, 4, 16)]
    machine = Machine(device="a cpu", num_devices=4, host_memory_bytes=2**34, backend="gloo", torch="2", python="3")
    return Profile(
        machine=machine, created="2026-01-01", duration_s=1, memory_bandwidth_bytes_per_s=1e10, device_memory_bytes=2**32,
        serving_steps=tuple(steps), serving_host=tuple(hosts),
    )  # fmt: skip


def test_an_engine_takes_the_steps_of_as_busy_a_machine() -> None:
    model, profile = ModelSpec.named("llama-3.2-1b"), _profile(alone=(1, 1.0), all=(4, 2.0))
    engine = MeasuredEngine.of(profile, model, ServingLayout(), "fp32", "fp32")
    assert engine is not None
    alone, *others = (engine.steps(devices).seconds(16, 2000) for devices in (1, 2, 4, 8))
    assert others == pytest.approx([2 * alone] * 3)
    assert engine.host_s == pytest.approx((2e-4, 1e-5))
    assert engine.profile(EngineProfile.named("meshwright")).overhead.row_s == pytest.approx(1e-5)


def test_an_engine_of_other_types_or_layouts_was_not_measured() -> None:
    model, profile = ModelSpec.named("llama-3.2-1b"), _profile(alone=(1, 1.0))
    assert MeasuredEngine.of(profile, model, ServingLayout(tp=2), "fp32", "fp32") is None
    assert MeasuredEngine.of(profile, model, ServingLayout(), "bf16", "bf16") is None
    assert MeasuredEngine.of(profile, ModelSpec.named("llama-3.1-8b"), ServingLayout(), "fp32", "fp32") is None
    assert MeasuredEngine.of(profile, model.replace(name="a copy"), ServingLayout(), "fp32", "fp32") is not None
