"""Exports of serving plans through the engines' own parsers and schemas, where those are installed (docs/engines.md)."""

from __future__ import annotations

from pathlib import Path

import yaml
from meshwright.engines import export
from serving_plans import CASES
from test_real_parsers import engine_reads
from test_serving_export import calls_of


def test_vllm_takes_the_options(tmp_path: Path) -> None:
    cases, pools, model = [], [], tmp_path / "a model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    for name, plan in CASES.items():
        for node in range(2 if plan.num_devices > 8 else 1):
            for call in calls_of(plan, "vllm", "serve.sh", tmp_path, str(node), MODEL=str(model)):
                cases.append({"command": "serve", "words": call["words"][1:]})
                pools.append((name, plan))
        for call in calls_of(plan, "vllm", "load.sh", tmp_path, MODEL=str(model)):
            cases.append({"command": "bench", "words": call["words"][2:]})
            pools.append((name, plan))
    answers = engine_reads("vllm_serve", cases)
    for case, (name, plan), answer in zip(cases, pools, answers, strict=True):
        assert "found" in answer, (name, case["words"], answer)
        found = answer["found"]
        if case["command"] == "bench":
            assert (found["random_input_len"], found["random_output_len"]) == (800, 100)
            continue
        degrees = (found["tensor_parallel_size"], found["pipeline_parallel_size"], found["data_parallel_size"])
        assert degrees in {(pool.layout.tp, pool.layout.pp, pool.layout.attention_dp) for pool in plan.pools}
        assert found["enable_expert_parallel"] == (plan.pools[0].layout.ep > 1)
        assert found["max_num_seqs"] == plan.pools[0].limits.max_batch
        assert found["enable_prefix_caching"] == plan.serving.prefix_cache
        assert found["connector"] == ("NixlConnector" if plan.mode == "disagg" else None)


def test_sglang_takes_the_options(tmp_path: Path) -> None:
    cases, plans = [], []
    for plan in CASES.values():
        for node in range(2 if plan.num_devices > 8 else 1):
            for call in calls_of(plan, "sglang", "serve.sh", tmp_path, str(node)):
                cases.append({"words": call["words"][2:]})
                plans.append(plan)
    for plan, case, answer in zip(plans, cases, engine_reads("sglang_args", cases), strict=True):
        assert "found" in answer, (case["words"], answer)
        found, layouts = answer["found"], [pool.layout for pool in plan.pools]
        assert (found["tp_size"], found["attn_dp_size"]) in {
            (layout.stage_devices, layout.attention_dp) for layout in layouts
        }
        assert found["disable_radix_cache"] != plan.serving.prefix_cache
        assert found["disaggregation_mode"] in {"null" if pool.role == "agg" else pool.role for pool in plan.pools}


def test_the_chart_of_llm_d_takes_the_values() -> None:
    plans = [plan for name, plan in CASES.items() if name != "two nodes"]
    cases = [{"values": yaml.safe_load(dict(export(plan, "llm-d").files)["values.yaml"])} for plan in plans]
    for answer in engine_reads("llm_d_values", cases):
        assert answer["found"]["unknown"] == []
        assert {"decode", "modelArtifacts", "prefill", "routing"} <= set(answer["found"]["sections"])
