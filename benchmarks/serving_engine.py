"""Our serving engine beside transformers' continuous batching, and beside what the simulation predicts for it.

    python benchmarks/serving_engine.py [--only peers|plan|products] [--repeats N]

Writes benchmarks/serving_engine.json. Models are made (fp32, one thread). ``--only`` runs one part and keeps the other part's rows.

Seconds are of the processor, as other programs may share the machine: the engine is given a clock that counts them, which jumps to
the next arrival where the engine has nothing to do. So are the steps of the profile that each load is planned with, measured just
before it on other rows and lengths than the load's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from meshwright.runtime.serving.engine import ServingEngine
from meshwright.runtime.serving.measure import measure_host
from meshwright.runtime.serving.requests import Request
from meshwright.schema import ClusterSpec, ModelSpec
from meshwright.schema.profile import Profile, ServingHostPoint, ServingStepPoint
from meshwright.schema.serving import EngineLimits, Pool, RequestClass, Requests, Serving, ServingLayout
from meshwright.schema.serving_plan import ServingPlan

RESULTS = Path(__file__).with_suffix(".json")
VOCABULARY = 8192
DTYPE: Any = "fp32"
MODELS: dict[str, dict[str, Any]] = {
    "llama-33m": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
                  "num_key_value_heads": 4},
    "llama-9m": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
                 "num_key_value_heads": 2},
}  # fmt: skip
LOADS = {
    "16 short prompts": {"count": 16, "prompt": (16, 128), "output": (16, 64)},
    "32 prompts of many lengths": {"count": 32, "prompt": (8, 384), "output": (8, 64)},
    "16 long prompts": {"count": 16, "prompt": (256, 640), "output": (8, 32)},
}
PLANNED = [
    {"load": "closed, 4 in flight", "concurrency": 4}, {"load": "closed, 12 in flight", "concurrency": 12},
    {"load": "closed, 24 in flight, 12 at once", "concurrency": 24},
    {"load": "open, 0.5 of the largest rate", "share": 0.5}, {"load": "open, 0.8 of it", "share": 0.8},
    {"load": "closed, 12 in flight, a third of the cache", "concurrency": 12, "cache_blocks": 60},
]  # fmt: skip
PLANNED_MODELS = ("smollm2-135m", "llama-33m")
COUNT, CLIENT_S = 60, 1e-3
"""Requests of a planned load; seconds from an answer's end until the client's next request is there."""


class ProcessorClock:
    """Seconds of the processor that this process took, and those that it skipped."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.skipped_s

    def skip_to(self, when: float) -> None:
        self.skipped_s += max(when - self(), 0.0)


def save(model: str, folder: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    made = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2048, **ids, **MODELS[model])
    ).eval()
    made.save_pretrained(folder)
    return made


def lengths(load: dict[str, Any], seed: int) -> tuple[list[int], list[int]]:
    draw = np.random.default_rng(seed)
    return tuple(draw.integers(*load[part], load["count"]).tolist() for part in ("prompt", "output"))  # type: ignore[return-value]


def prompts_of(sizes: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (size,), generator=generator).tolist() for size in sizes]


def make_pool(**limits: int) -> Pool:
    chosen = {
        "max_batch": 16,
        "max_batched_tokens": 256,
        "chunk": 256,
        "block_size": 16,
        "cache_blocks": 1024,
        **limits,
    }
    return Pool(
        device="cpu", replicas=1, layout=ServingLayout(), weights="fp32", cache="fp32", limits=EngineLimits(**chosen)
    )


# --- transformers ----------------------------------------------------------------------------------------------------


def ours(folder: str, prompts: list[list[int]], outputs: list[int]) -> tuple[list[list[int]], float]:
    engine = ServingEngine.build(folder, make_pool(), prefix_cache=False)
    begun = time.process_time()
    names = [engine.submit(Request(prompt=tuple(p), max_tokens=n)) for p, n in zip(prompts, outputs, strict=True)]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request].append(event.token or 0)
    return [tokens[name] for name in names], time.process_time() - begun


def theirs(model: Any, prompts: list[list[int]], outputs: list[int], **settings: int) -> tuple[list[list[int]], float]:
    """Generate by transformers; requests of unlike lengths are added one by one."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0)
    chosen = ContinuousBatchingConfig(
        max_batch_tokens=256, max_requests_per_batch=16, allow_block_sharing=False, **settings
    )
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=chosen)
    begun = time.process_time()
    names = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, outputs, strict=True)]
    manager.start()
    done: dict[str, list[int]] = {}
    while len(done) < len(names):
        if (result := manager.get_result(timeout=1)) is not None and result.is_finished():
            done[result.request_id] = result.generated_tokens
    seconds = time.process_time() - begun
    manager.stop(block=True)
    return [done[name] for name in names], seconds


SETTINGS = [{"page_size": 256, "num_blocks": 80}, {"page_size": 32, "num_blocks": 640}]
"""Of transformers, the best of which counts: its default pages, and pages of about ours."""


def peers(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            model = save(name, folder)
            for load, sizes in LOADS.items():
                prompt_len, output_len = lengths(sizes, seed=3)
                prompts, count = prompts_of(prompt_len, seed=4), sum(output_len)
                speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
                equal = 0.0
                for _ in range(repeats):  # in turns
                    mine, seconds = ours(folder, prompts, output_len)
                    speeds["ours"].append(count / seconds)
                    runs = [theirs(model, prompts, output_len, **settings) for settings in SETTINGS]
                    speeds["theirs"].append(count / min(s for _, s in runs))
                    equal = statistics.mean(a == b for a, b in zip(mine, runs[0][0], strict=True))
                found = {key: statistics.median(values) for key, values in speeds.items()}
                rows.append({
                    "model": name, "load": load, "tokens": count, "ours_tokens_per_s": found["ours"],
                    "transformers_tokens_per_s": found["theirs"], "ratio": found["ours"] / found["theirs"],
                    "requests_with_equal_tokens": equal,
                })  # fmt: skip
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


# --- the plan --------------------------------------------------------------------------------------------------------


def served(
    folder: str | ModelSpec,
    pool: Pool,
    sizes: tuple[list[int], list[int]],
    *,
    concurrency: int | None,
    arrivals: list[float],
) -> list[Any]:
    """Serve a load on the processor's clock; return the times of its requests in order.

    Requests come while the engine is in a step and are handed in after it, with the time at which they came.
    """
    clock = ProcessorClock()
    engine = ServingEngine.build(folder, pool, prefix_cache=False, clock=clock)
    vocabulary = engine.spec.vocab_size
    prompts = [[token % vocabulary for token in prompt] for prompt in prompts_of(sizes[0], seed=6)]
    origin = clock()
    coming = arrivals if concurrency is None else [0.0] * min(concurrency, len(prompts))
    due = [origin + when for when in coming]  # in order
    names: list[str] = []
    while len(names) < len(prompts) or engine.has_work:
        if not engine.has_work:
            clock.skip_to(due[len(names)])
        while len(names) < len(due) and clock() >= due[len(names)]:
            idx = len(names)
            names.append(engine.submit(Request(prompt=tuple(prompts[idx]), max_tokens=sizes[1][idx])))
            engine.times(names[idx]).submitted_s = due[idx]  # type: ignore[union-attr]
        ended = [event.time_s for event in engine.step() if event.finish is not None]
        if concurrency is not None:
            due += [when + CLIENT_S for when in ended][: len(prompts) - len(due)]
    return [engine.times(name) for name in names]


def planned(repeats: int) -> list[dict[str, Any]]:
    """Measure the engine, plan a load with the profile, and serve it: what `profile`, `plan`, `replay` and `serve` do."""
    rows = []
    for model in PLANNED_MODELS:
        with tempfile.TemporaryDirectory() as folder:
            if model in MODELS:
                save(model, folder)
            served_model = folder if model in MODELS else ModelSpec.named(model)
            for case in PLANNED:
                for seed in range(repeats):
                    rows.append({"model": model, **_compared(served_model, case, seed)})
                    print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _compared(served_model: Any, case: dict[str, Any], seed: int) -> dict[str, Any]:
    from meshwright.planner.serving.replay import replay
    from meshwright.schema.requests_file import read_trace

    spec = served_model if isinstance(served_model, ModelSpec) else ModelSpec.resolve(served_model)
    sizes = lengths({"count": COUNT, "prompt": (16, 320), "output": (8, 64)}, seed=seed)
    plan = plan_of(spec, measured_profile(served_model), case, sizes)
    rate = plan.serving.requests.rate
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1 / rate, COUNT)).tolist() if rate is not None else [0.0] * COUNT
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.csv")
        lines = (f"{a},{p},{o}" for a, p, o in zip(arrivals, *sizes, strict=True))
        trace.write_text("\n".join(("arrival_s,prompt_tokens,output_tokens", *lines)))
        said = replay(plan, read_trace(trace), concurrency=case.get("concurrency")).latencies
    times = served(served_model, plan.pools[0], sizes, concurrency=case.get("concurrency"), arrivals=arrivals)
    row: dict[str, Any] = {"load": case["load"], "seed": seed}
    for name in ("ttft", "tpot", "queue", "e2e"):
        seen = np.array([t.last_s - t.submitted_s if name == "e2e" else getattr(t, f"{name}_s") for t in times])
        seen = seen[np.isfinite(seen)]
        row |= {f"{name}_ms": 1e3 * seen.mean(), f"planned_{name}_ms": 1e3 * said[name].mean_s}
        row |= {f"{name}_p90_ms": 1e3 * np.quantile(seen, 0.9), f"planned_{name}_p90_ms": 1e3 * said[name].p90_s}
    row["preemptions"] = sum(t.preemptions for t in times)
    return row


def plan_of(spec: ModelSpec, profile: Profile, case: dict[str, Any], sizes: tuple[list[int], list[int]]) -> ServingPlan:
    """Return the plan of one instance for a load."""
    from meshwright.planner import plan

    prompt, output = (round(statistics.mean(values)) for values in sizes)
    load: dict[str, Any] = {"concurrency": case["concurrency"]} if "concurrency" in case else {}
    task = Serving(
        requests=Requests(classes=(RequestClass(prompt_len=prompt, output_len=output),), **load),
        engine="meshwright", modes=("agg",), weights=DTYPE, cache=DTYPE, prefix_cache=False, objective="throughput",
    )  # fmt: skip
    cluster = this_machine().replace(profile=profile)
    fixed = {"max_batch": 12, "max_batched_tokens": 256}
    answer = plan(spec, cluster, task, fixed=fixed)
    if "share" in case:
        rate = case["share"] * answer.estimate.requests_per_s
        answer = plan(spec, cluster, task.replace(requests=task.requests.replace(rate=rate)), fixed=fixed)
    pool = answer.pools[0]
    limits = pool.limits.replace(cache_blocks=case.get("cache_blocks", 1024))
    return answer.replace(pools=(pool.replace(limits=limits),))


@cache
def this_machine() -> ClusterSpec:
    """Return this machine as one device."""
    return ClusterSpec.parse("local:1")


def measured_profile(served_model: Any) -> Profile:
    """Return the profile of an engine as just measured, on the processor's clock."""
    pool = make_pool(max_batch=12)
    engine = ServingEngine.build(
        served_model, pool.replace(weights=DTYPE, cache=DTYPE), prefix_cache=False, clock=time.process_time
    )
    records, hosts = engine.measure(max_context=384, budget_s=300)[0], measure_host(engine)
    case = {"model": "", "content": engine.spec.content, "layout": pool.layout, "weights": DTYPE, "cache": DTYPE}
    names = ("decode_rows", "cached_tokens", "prefill_tokens", "prefill_context", "prompts")
    steps = [
        ServingStepPoint(**case, devices_in_use=1, time_s=record.seconds, **{n: getattr(record, n) for n in names})
        for record in records
    ]
    between = [ServingHostPoint(**case, devices_in_use=1, rows=h.decode_rows, time_s=h.seconds) for h in hosts]
    known = this_machine().profile
    assert known is not None
    return known.replace(serving_steps=tuple(steps), serving_host=tuple(between))


# --- products --------------------------------------------------------------------------------------------------------


def products(repeats: int) -> list[dict[str, Any]]:
    """Time a product of few rows as torch makes it, and with weights in the order of oneDNN's kernels."""
    weights = [torch.randn(1408, 512) for _ in range(40)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in weights]
    found = []
    with torch.inference_mode():
        for rows in (1, 2, 4, 8, 16, 32, 64, 256):
            x = torch.randn(rows, 512)
            plain_s = _fastest(repeats, lambda x=x: [torch.nn.functional.linear(x, weight) for weight in weights])
            packed_s = _fastest(
                repeats, lambda x=x: [torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in packed]
            )
            found.append({"rows": rows, "plain_us": plain_s * 1e6 / 40, "packed_us": packed_s * 1e6 / 40})
    return found


def _fastest(repeats: int, call: Any) -> float:
    times = []
    for _ in range(max(repeats, 3)):
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return min(times)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean and median relative errors of the plan's means."""
    result = {}
    for name in ("ttft", "tpot", "queue", "e2e"):
        errors = [abs(row[f"planned_{name}_ms"] / row[f"{name}_ms"] - 1) for row in rows]
        result |= {f"{name}_mean_error": statistics.mean(errors), f"{name}_median_error": statistics.median(errors)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("peers", "plan", "products"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    parts = {"peers": peers, "plan": planned, "products": products}
    for name, run in parts.items():
        if options.only in (None, name):
            results[name] = run(options.repeats)
    if "plan" in results:
        results["plan_summary"] = summary(results["plan"])
    if "peers" in results:
        results["least_ratio"] = min(row["ratio"] for row in results["peers"])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({key: results[key] for key in ("plan_summary", "least_ratio") if key in results}))


if __name__ == "__main__":
    main()
