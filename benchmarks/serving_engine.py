"""Our serving engine beside transformers' continuous batching, and beside what the simulation predicts for it.

    python benchmarks/serving_engine.py [--only peers|plan|products] [--repeats N]

Writes benchmarks/serving_engine.json. Models are made (fp32, one thread). ``--only`` runs one part and keeps the other part's rows.

Seconds are of the processor, as other programs may share the machine: the engine is given a clock that counts them, which jumps to
the next arrival where the engine has nothing to do. So are the steps that the simulation predicts from (`measure_steps`, made
before each load on other rows and lengths than the load's).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.measured_steps import MeasuredSteps
from meshwright.cost_models.serving.simulation import EnginePool, RequestTable, simulate
from meshwright.runtime.serving.engine import ServingEngine
from meshwright.runtime.serving.measure import measure_steps
from meshwright.runtime.serving.requests import Request
from meshwright.schema.serving import EngineLimits, Pool, ServingLayout

RESULTS = Path(__file__).with_suffix(".json")
VOCABULARY = 8192
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
    {"load": "open, 0.5 of what 12 in flight reach", "share": 0.5}, {"load": "open, 0.8 of it", "share": 0.8},
    {"load": "closed, 12 in flight, a third of the cache", "concurrency": 12, "cache_blocks": 60},
]  # fmt: skip


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
    folder: str, pool: Pool, sizes: tuple[list[int], list[int]], *, concurrency: int | None, arrivals: list[float]
) -> list[Any]:
    """Serve a load on the processor's clock; return the times of its requests in order."""
    clock = ProcessorClock()
    engine = ServingEngine.build(folder, pool, prefix_cache=False, clock=clock)
    prompts = prompts_of(sizes[0], seed=6)
    origin, sent = clock(), 0
    names: list[str] = []
    live = 0
    while sent < len(prompts) or engine.has_work:
        if concurrency is None and not engine.has_work:
            clock.skip_to(origin + arrivals[sent])
        while sent < len(prompts) and (
            live < concurrency if concurrency is not None else clock() - origin >= arrivals[sent]
        ):
            names.append(engine.submit(Request(prompt=tuple(prompts[sent]), max_tokens=sizes[1][sent])))
            if concurrency is None:  # it came while the engine was in a step
                engine.times(names[-1]).submitted_s = origin + arrivals[sent]  # type: ignore[union-attr]
            sent, live = sent + 1, live + 1
        live -= sum(event.finish is not None for event in engine.step())
    return [engine.times(name) for name in names]


def planned(repeats: int) -> list[dict[str, Any]]:
    rows, profile = [], EngineProfile.named("meshwright")
    # Requests are handed in by a function call: no front end, no way.
    profile = profile.model_copy(
        update={"request": profile.request.model_copy(update=dict.fromkeys(("fixed_s", "token_s", "way_s"), 0.0))}
    )
    with tempfile.TemporaryDirectory() as folder:
        save("llama-33m", folder)
        for case in PLANNED:
            found = [_compared(folder, case, profile, seed) for seed in range(repeats)]
            for row in found:
                print(row, file=sys.stderr, flush=True)
            rows += found
    return rows


def _compared(folder: str, case: dict[str, Any], profile: EngineProfile, seed: int) -> dict[str, Any]:
    pool = make_pool(max_batch=12, cache_blocks=case.get("cache_blocks", 1024))
    sizes = lengths({"count": 48, "prompt": (16, 320), "output": (8, 64)}, seed=seed)
    steps = fitted(folder)
    table = RequestTable.of(*sizes)
    simulated_pool = EnginePool.of(steps, profile, pool.limits)
    arrivals: list[float] = []
    if share := case.get("share"):
        full = simulate(simulated_pool, table, concurrency=12)
        rate = share * len(table) / full.duration_s
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(table))).tolist()
        table = RequestTable.of(*sizes, arrival_s=arrivals)
    said = simulate(simulated_pool, table, concurrency=case.get("concurrency"))
    times = served(folder, pool, sizes, concurrency=case.get("concurrency"), arrivals=arrivals)
    row: dict[str, Any] = {"load": case["load"], "seed": seed, "fit_error": steps.error}
    for name, planned_s in (
        ("ttft", said.ttft_s),
        ("tpot", said.tpot_s[said.output_len > 1]),
        ("queue", said.queue_s),
        ("e2e", said.e2e_s),
    ):
        seen = np.array([t.last_s - t.submitted_s if name == "e2e" else getattr(t, f"{name}_s") for t in times])
        seen = seen[np.isfinite(seen)]
        row |= {f"{name}_ms": 1e3 * seen.mean(), f"planned_{name}_ms": 1e3 * planned_s.mean()}
        row |= {
            f"{name}_p90_ms": 1e3 * np.quantile(seen, 0.9),
            f"planned_{name}_p90_ms": 1e3 * np.quantile(planned_s, 0.9),
        }
    row["preemptions"], row["planned_preemptions"] = sum(t.preemptions for t in times), int(said.preemptions.sum())
    return row


def fitted(folder: str) -> MeasuredSteps:
    """Return the steps of an engine as just measured."""
    engine = ServingEngine.build(folder, make_pool(max_batch=12), prefix_cache=False)
    records = measure_steps(engine, max_context=384, repeats=3, clock=time.process_time)
    return MeasuredSteps.fit(
        *([getattr(record, name) for record in records]
          for name in ("decode_rows", "cached_tokens", "prefill_tokens", "prefill_context", "prompts", "seconds"))
    )  # fmt: skip


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
    for name in ("ttft", "tpot", "e2e"):
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
