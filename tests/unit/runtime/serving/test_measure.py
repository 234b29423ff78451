from __future__ import annotations

from pathlib import Path

import pytest
from meshwright.runtime.serving.engine import ServingEngine
from meshwright.runtime.serving.measure import measure_host, measure_steps
from meshwright.runtime.serving.requests import Request
from serving_models import answers, generated, make_pool, make_prompts, save_model


def test_measured_steps_cover_the_limits_and_leave_the_engine_as_it_was(tmp_path: Path) -> None:
    model, prompts = save_model("Llama", tmp_path), make_prompts((5, 20))
    ticks = iter(range(100_000))
    engine = ServingEngine.build(tmp_path, make_pool())
    records = measure_steps(engine, max_context=32, repeats=1, clock=lambda: float(next(ticks)))
    assert {record.decode_rows for record in records} == {0, 1, 2, 4}
    assert max(record.prefill_tokens + record.decode_rows for record in records) == engine.pool.limits.chunk
    # Four rows from a quarter of 32 tokens to all of them.
    assert max(record.cached_tokens for record in records) == 14 + 20 + 26 + 32
    assert {record.prompts for record in records} >= {0, 1}
    assert {record.seconds for record in records} == {1.0}
    assert engine.stats().steps == 0
    assert answers(engine, [Request(prompt=p, max_tokens=8) for p in prompts]) == generated(model, prompts, 8)


def test_steps_beyond_the_time_are_left_out_the_largest_first(tmp_path: Path) -> None:
    save_model("Llama", tmp_path)
    engine = ServingEngine.build(tmp_path, make_pool())
    every = measure_steps(engine, max_context=32, repeats=1)
    few = measure_steps(engine, max_context=32, repeats=1, budget_s=0)
    assert len(few) == 1
    assert few[0].decode_rows + few[0].prefill_tokens == min(one.decode_rows + one.prefill_tokens for one in every)


def test_the_host_is_what_lies_between_two_steps(tmp_path: Path) -> None:
    save_model("Llama", tmp_path)
    ticks = iter(range(100_000))
    engine = ServingEngine.build(tmp_path, make_pool(max_batch=4), clock=lambda: float(next(ticks)))
    found = measure_host(engine, prompt_len=2)
    assert [record.decode_rows for record in found] == [1, 4]
    assert not engine.has_work
    # The clock is read once to schedule, once when the step begins and once when it has ended.
    assert [record.seconds for record in found] == [2.0, 2.0]


def test_an_engine_with_requests_is_not_measured(tmp_path: Path) -> None:
    save_model("Llama", tmp_path)
    engine = ServingEngine.build(tmp_path, make_pool())
    engine.submit(Request(prompt=(1,), max_tokens=1))
    with pytest.raises(RuntimeError, match="with requests"):
        measure_steps(engine, max_context=32)


def test_a_clock_that_is_handed_in_tells_all_times(tmp_path: Path) -> None:
    save_model("Llama", tmp_path)
    ticks = iter(range(100_000))
    engine = ServingEngine.build(tmp_path, make_pool(), clock=lambda: float(next(ticks)))
    events = []
    name = engine.submit(Request(prompt=(1, 2), max_tokens=3))
    while engine.has_work:
        events += engine.step()
    times = engine.times(name)
    assert times is not None
    assert [event.time_s for event in events] == sorted(event.time_s for event in events)
    assert times.submitted_s == 0.0
    assert times.submitted_s < times.scheduled_s < times.first_s < times.last_s < 100
    assert all(record.seconds.is_integer() for record in engine.stats().records)
