from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from meshwright.runtime.serving.engine import ServingEngine
from meshwright.runtime.serving.requests import EngineBusyError, Request, Sampling, TokenEvent
from meshwright.schema.errors import ConfigError, RuntimeMismatchError
from meshwright.schema.serving import ServingLayout
from serving_models import FAMILIES, answers, generated, make_pool, make_prompts, save_model

LENGTHS = (1, 5, 17, 33, 40, 8, 3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return save_model("Llama", folder), folder


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_every_family_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model, prompts = save_model(family, tmp_path), make_prompts(LENGTHS)
    engine = ServingEngine.build(tmp_path, make_pool())
    assert answers(engine, [Request(prompt=p, max_tokens=12) for p in prompts]) == generated(model, prompts, 12)


@pytest.mark.parametrize(
    ("limits", "prefix_cache"),
    [
        pytest.param({"chunk": None, "max_batched_tokens": 64}, True, id="prompts uncut"),
        pytest.param({"chunk": 1}, True, id="prompts token by token"),
        pytest.param({"block_size": 1, "cache_blocks": 240}, False, id="blocks of one token"),
        pytest.param({"max_batch": 1}, True, id="one at a time"),
        pytest.param({"block_size": 64, "cache_blocks": 8}, False, id="large blocks"),
    ],
)
def test_limits_change_no_token(llama: tuple[Any, Path], limits: dict[str, Any], prefix_cache: bool) -> None:
    model, folder = llama
    prompts = make_prompts(LENGTHS)
    engine = ServingEngine.build(folder, make_pool(**limits), prefix_cache=prefix_cache)
    assert answers(engine, [Request(prompt=p, max_tokens=12) for p in prompts]) == generated(model, prompts, 12)
    assert engine.stats().used_blocks == 0


def test_requests_that_lose_their_blocks_are_computed_again(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    prompts = make_prompts((9, 11, 10, 12))
    engine = ServingEngine.build(folder, make_pool(cache_blocks=12), prefix_cache=False)
    assert answers(engine, [Request(prompt=p, max_tokens=30) for p in prompts]) == generated(model, prompts, 30)
    assert engine.stats().preemptions > 0


def test_a_known_prefix_is_not_computed_again(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    start = make_prompts((24,))[0]
    prompts = [start + end for end in make_prompts((5, 6), seed=2)]
    engine = ServingEngine.build(folder, make_pool())
    tokens = [answers(engine, [Request(prompt=p, max_tokens=8)])[0] for p in prompts]
    assert tokens == generated(model, prompts, 8)
    assert [times.cached_tokens for times in engine.stats().requests] == [0, 24]


def test_a_stop_token_ends_the_answer_with_it(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    prompt = make_prompts((9,))[0]
    full = generated(model, [prompt], 12)[0]
    stop = full[4]
    engine = ServingEngine.build(folder, make_pool())
    heard: list[TokenEvent] = []
    engine.submit(Request(prompt=prompt, max_tokens=12, stop_tokens=frozenset({stop})), on_token=heard.append)
    engine.drain()
    assert [event.token for event in heard] == full[: full.index(stop) + 1]
    assert [event.finish for event in heard] == [None] * full.index(stop) + ["stop"]


def test_a_cancelled_request_ends_once_and_frees_its_blocks(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    prompts = make_prompts((9, 20, 30))
    engine = ServingEngine.build(folder, make_pool())
    names = [engine.submit(Request(prompt=p, max_tokens=40)) for p in prompts]
    events = [event for _ in range(6) for event in engine.step()]
    assert engine.cancel(names[0])
    assert engine.cancel(names[2])  # still in its prompt
    while engine.has_work:
        events += engine.step()
    assert not engine.cancel(names[0])
    ends = {event.request: event.finish for event in events if event.finish}
    assert ends == {names[0]: "cancelled", names[1]: "length", names[2]: "cancelled"}
    kept = [event.token for event in events if event.request == names[1]]
    assert kept == generated(model, prompts[1:2], 40)[0]
    assert engine.stats().used_blocks == 0


def test_draws_follow_seed_and_position_alone(llama: tuple[Any, Path]) -> None:
    _, folder = llama
    prompts = make_prompts((9, 20, 30))
    requests = [
        Request(prompt=p, max_tokens=12, sampling=Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=i))
        for i, p in enumerate(prompts)
    ]
    together = answers(ServingEngine.build(folder, make_pool()), requests)
    tight = ServingEngine.build(folder, make_pool(cache_blocks=14, chunk=3), prefix_cache=False)
    assert answers(tight, requests) == together
    other = [Request(prompt=prompts[0], max_tokens=12, sampling=Sampling(temperature=1.5, seed=9))]
    assert answers(ServingEngine.build(folder, make_pool()), other) != together[:1]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt=(), max_tokens=1), "the prompt is empty"),
        (Request(prompt=(1,), max_tokens=0), "max_tokens 0 is below 1"),
        (Request(prompt=(1, 96), max_tokens=1), "token 96 of the prompt is not in the vocabulary of 96"),
        (Request(prompt=(-1,), max_tokens=1), "token -1"),
        (Request(prompt=(1,) * 200, max_tokens=41), "more than the 240 that a request may have here"),
        (Request(prompt=(1,), max_tokens=1, adapter="none"), "there is no adapter none"),
    ],
)
def test_what_cannot_be_served_is_refused(llama: tuple[Any, Path], request_: Request, message: str) -> None:
    engine = ServingEngine.build(llama[1], make_pool())
    with pytest.raises(ConfigError, match=message):
        engine.submit(request_)
    assert not engine.has_work


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}, {"seed": 2**63}]
)
def test_senseless_sampling_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_a_full_queue_and_a_draining_engine_refuse_and_lose_nothing(llama: tuple[Any, Path]) -> None:
    engine = ServingEngine.build(llama[1], make_pool(), max_queue=2)
    request = Request(prompt=(1, 2, 3), max_tokens=5)
    accepted = [engine.submit(request) for _ in range(2)]
    with pytest.raises(EngineBusyError, match="2 requests wait already"):
        engine.submit(request)
    engine.stop_accepting()
    with pytest.raises(EngineBusyError, match="draining"):
        engine.submit(request)
    ended = [event.request for event in engine.drain() if event.finish == "length"]
    assert sorted(ended) == sorted(accepted)


def test_a_thread_steps_and_listeners_hear_every_token_in_order(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    prompts = make_prompts(LENGTHS)
    heard: dict[str, list[TokenEvent]] = {}
    with ServingEngine.build(folder, make_pool()) as engine:
        engine.start()
        names = [
            engine.submit(
                Request(prompt=p, max_tokens=10),
                on_token=lambda event: heard.setdefault(event.request, []).append(event),
            )
            for p in prompts
        ]
        engine.drain()
        times = [engine.times(name) for name in names]
    assert [[event.token for event in heard[name]] for name in names] == generated(model, prompts, 10)
    assert all([event.index for event in events] == list(range(10)) for events in heard.values())
    assert all(t is not None and t.submitted_s <= t.scheduled_s <= t.first_s <= t.last_s for t in times)


def test_records_count_what_the_steps_did(llama: tuple[Any, Path]) -> None:
    engine = ServingEngine.build(llama[1], make_pool(), prefix_cache=False)
    answers(engine, [Request(prompt=p, max_tokens=6) for p in make_prompts((10, 20))])
    records = engine.stats().records
    assert sum(record.prefill_tokens for record in records) == 30
    assert sum(record.prompts for record in records) == 2
    assert sum(record.decode_rows for record in records) == 2 * 5
    # The fed tokens 2 to 6 of each answer attend to the prompt and all tokens up to themselves.
    assert sum(record.cached_tokens for record in records) == sum(n + i for n in (10, 20) for i in range(1, 6))


def test_made_weights_serve_a_model_without_files() -> None:
    from meshwright.schema.model import ModelSpec

    spec = ModelSpec.from_hf(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
         "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False},
        name="tiny",
    )  # fmt: skip
    request = [Request(prompt=(1, 2, 3), max_tokens=5)]
    first, again, other = (answers(ServingEngine.build(spec, make_pool(), seed=seed), request) for seed in (0, 0, 1))
    assert first == again
    assert len(other[0]) == 5


def test_a_layout_of_several_ranks_needs_them(llama: tuple[Any, Path]) -> None:
    with pytest.raises(RuntimeMismatchError, match="the layout needs 2 ranks"):
        ServingEngine.build(llama[1], make_pool(layout=ServingLayout(tp=2)))


def test_types_that_the_engine_lacks_are_refused(llama: tuple[Any, Path]) -> None:
    pool = make_pool().model_copy(update={"weights": "fp8"})
    with pytest.raises(ConfigError, match="no fp8 weights"):
        ServingEngine.build(llama[1], pool)


def test_half_precision_is_served(llama: tuple[Any, Path]) -> None:
    pool = make_pool().model_copy(update={"weights": "bf16", "cache": "bf16"})
    tokens = answers(
        ServingEngine.build(llama[1], pool), [Request(prompt=p, max_tokens=5) for p in make_prompts((4, 9))]
    )
    assert [len(one) for one in tokens] == [5, 5]
    assert torch.tensor(tokens).max() < 96
