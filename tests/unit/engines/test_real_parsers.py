"""Written configurations through the engines' own parsers and validators, where those are installed.

Each engine reads in a process of its own (parsers/), under ``ENGINES_PYTHON`` where that names an interpreter, so that the engines
may lie in an environment apart; ``MEGATRON_LM`` names a checkout of Megatron-LM. docs/engines.md has the commands.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from meshwright.engines import export
from meshwright.schema import ClusterSpec, Layout, ModelSpec, TrainingPlan, Workload
from plans import make_plan

PARSERS = Path(__file__).parent / "parsers"
MODELS = Path(__file__).parents[3] / "schema" / "catalogue" / "models"

pytestmark = pytest.mark.long


def engine_reads(parser: str, cases: Sequence[dict[str, Any]], checkout: str = "") -> list[dict[str, Any]]:
    """What an engine makes of each case, ``found`` or ``error``; skips where the engine cannot be imported."""
    program, path = os.environ.get("ENGINES_PYTHON", sys.executable), os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, [checkout, path]))}
    command = [program, str(PARSERS / f"{parser}.py")]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, env=environment)
    if done.returncode and re.search(r"^(ModuleNotFound|Import)Error", done.stderr, re.MULTILINE):
        pytest.skip(f"{program}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for answer in answers:
        if str(answer.get("error", "")).startswith("ModuleNotFoundError"):
            pytest.skip(f"{program}: {answer['error']}")
    return answers


def plan_of(
    layout: Layout, model: str = "llama-3.1-8b", blocks: tuple[int, ...] | None = None, **workload: Any
) -> TrainingPlan:
    work = Workload(seq_len=4096, global_batch_size=16 * layout.dp * layout.micro_batch_size, **workload)
    plan = make_plan(ModelSpec.named(model), layout, workload=work, blocks_per_stage=blocks)
    of_nvidia = layout.tp_overlap or layout.cuda_graphs
    return plan.replace(cluster=ClusterSpec.parse(f"{layout.world_size}xH100-SXM-80GB")) if of_nvidia else plan


def of_megatron(**fields: Any) -> Layout:
    """Megatron shards optimizer states alone."""
    layout = Layout(**fields)
    return layout.replace(zero_stage=min(layout.zero_stage, 1))


def hub_config(model: str) -> dict[str, Any]:
    """The published config.json, with the router's function, which the catalogue's excerpt leaves out."""
    config = json.loads((MODELS / f"{model}.json").read_text())["config"]
    return config | ({"scoring_func": "sigmoid"} if model == "deepseek-v3" else {})


MEGATRON: dict[str, tuple[TrainingPlan, str]] = {
    name: (plan_of(of_megatron(**fields), model, blocks, **workload), recipe)
    for name, model, recipe, fields, blocks, workload in (
        ("dense", "llama-3.1-8b", "llama.llama31_8b", {"tp": 2, "dp_shard": 4}, None, {}),
        ("chunks", "llama-3.1-70b", "llama.llama31_70b", {"tp": 4, "pp": 4, "num_model_chunks": 4, "dp_shard": 4}, None, {}),
        ("uneven", "llama-3.1-70b", "llama.llama31_70b", {"tp": 4, "pp": 4, "dp_shard": 4}, (19, 20, 21, 20), {}),
        (
            "uneven-chunks", "llama-3.1-70b", "llama.llama31_70b",
            {"tp": 4, "pp": 4, "num_model_chunks": 2, "dp_shard": 4}, (9, 10, 10, 10, 10, 10, 10, 11), {},
        ),
        (
            "405b", "llama-3.1-405b", "llama.llama31_405b",
            {"tp": 8, "pp": 16, "cp": 2, "dp_shard": 4, "recompute": "full"}, (7, *[8] * 14, 7), {},
        ),
        (
            "moe", "qwen3-235b-a22b", "qwen.qwen3_235b_a22b",
            {"tp": 2, "pp": 4, "ep": 8, "dp_shard": 8, "recompute": "selective"}, (23, 24, 24, 23), {},
        ),
        ("moe-alone", "qwen3-30b-a3b", "qwen.qwen3_30b_a3b", {"ep": 8, "dp_shard": 8, "recompute": "selective"}, None, {}),
        (
            "mla", "deepseek-v3", "deepseek.deepseek_v3",
            {"tp": 2, "pp": 8, "ep": 16, "dp_shard": 16, "recompute": "selective"}, (7, *[8] * 6, 6), {},
        ),
        ("mla-one-stage", "deepseek-v3", "deepseek.deepseek_v3", {"tp": 2, "ep": 16, "dp_shard": 16}, None, {}),
        ("mla-lite", "deepseek-v2-lite", "deepseek.deepseek_v2_lite", {"ep": 8, "dp_shard": 8}, None, {}),
        ("fp8", "llama-3.1-8b", "llama.llama31_8b", {"tp": 2, "dp_shard": 4}, None, {"precision": "fp8"}),
        ("block", "llama-3.1-8b", "llama.llama31_8b", {"dp_shard": 4, "recompute": "full", "recompute_fraction": 0.5}, None, {}),
        ("ring", "llama-3.1-8b", "llama.llama31_8b", {"cp": 4, "cp_ulysses": 2, "dp_shard": 4}, None, {}),
        ("replicas", "llama-3.1-8b", "llama.llama31_8b", {"tp": 4, "dp_shard": 4, "dp_replicate": 2}, None, {}),
        ("switches", "llama-3.1-8b", "llama.llama31_8b", {"tp": 2, "dp_shard": 2, "tp_overlap": True, "cuda_graphs": True,
            "gradients": "compute"}, None, {}),
        ("activations", "llama-3.1-8b", "llama.llama31_8b", {"dp_shard": 4, "offload_activations": 0.5}, None, {}),
        ("plain", "qwen3-8b", "qwen.qwen3_8b", {"dp_replicate": 4}, None, {}),
        ("offload", "qwen3-8b", "qwen.qwen3_8b", {"dp_shard": 4, "offload": "optimizer", "offload_fraction": 0.5}, None, {}),
    )
}  # fmt: skip
"""Case -> plan, and the recipe of Megatron Bridge that its overrides are for; of 70B, 405B and DeepSeek those that decide most."""


def expected_of_megatron(plan: TrainingPlan) -> dict[str, Any]:
    return {
        "chunks": plan.layout.num_model_chunks,
        "data_parallel": plan.layout.dp,
        "gradients_in_fp32": plan.layout.gradients == "fp32",
        "fp8": "hybrid" if plan.workload.precision == "fp8" else None,
        "tp_overlap": plan.layout.tp_overlap,
    }


def test_megatron_lm_takes_the_script(tmp_path: Path) -> None:
    """The script as bash reads it, with the options of the command that the export names."""
    cases = []
    for name, (plan, _) in MEGATRON.items():
        made = export(plan, "megatron")
        script = made.write(tmp_path / name)[0].read_text()
        shown = re.sub(r"\ntorchrun.*", '\nprintf "%s\\\\0" "${MODEL_ARGS[@]}" "${PLAN_ARGS[@]}"', script)
        words = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout.split("\0")
        added = made.command.split()[2:]
        cases.append({"words": words[:-1] + added, "num_devices": plan.layout.world_size})
    answers = engine_reads("megatron_lm", cases, os.environ.get("MEGATRON_LM", ""))
    for (name, (plan, _)), answer in zip(MEGATRON.items(), answers, strict=True):
        expected = expected_of_megatron(plan) | {"layers": plan.model.num_blocks}
        assert answer == {"found": expected}, name


def test_megatron_bridge_takes_the_overrides(tmp_path: Path) -> None:
    """Every override is what the validated configuration has, whatever the recipe said."""
    cases = []
    for name, (plan, recipe) in MEGATRON.items():
        path = export(plan, "nemo").write(tmp_path / name)[0]
        case = {"path": str(path), "recipe": f"{recipe}_pretrain_config", "config": hub_config(plan.model.name)}
        cases.append(case | {"num_devices": plan.layout.world_size})
    for (name, (plan, _)), answer in zip(MEGATRON.items(), engine_reads("bridge", cases), strict=True):
        blocks = [[idx for idx in stage.layer_idxs if 0 < idx <= plan.model.num_blocks] for stage in plan.stages]
        even = len({len(idxs) for idxs in blocks}) == 1
        stages = [["decoder"] * len(idxs) for idxs in blocks]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        expected = expected_of_megatron(plan) | {"stages": None if even else stages, "unheeded": []}
        assert answer == {"found": expected}, name


def test_torchtitan_takes_the_module(tmp_path: Path) -> None:
    plans = {
        "pipeline": plan_of(Layout(pp=2, dp_shard=2, tp=2, recompute="selective")),
        "uneven": plan_of(Layout(pp=2, dp_shard=4, recompute="full"), blocks=(17, 15)),
        "chunks": plan_of(Layout(pp=4, dp_shard=2, num_model_chunks=2)),
        "context": plan_of(Layout(cp=2, dp_shard=4, tp=2)),
        "replicas": plan_of(Layout(dp_replicate=2, dp_shard=4, micro_batch_size=2)),
        "table": plan_of(Layout(pp=2, schedule="zb-h1")),
        "zb-v": plan_of(Layout(pp=2, num_model_chunks=2, schedule="zb-v")),
        "offload": plan_of(Layout(dp_shard=8, offload="parameters")),
        "experts": plan_of(Layout(ep=8, dp_shard=8), "qwen3-30b-a3b"),
        "latent": plan_of(Layout(ep=8, tp=2, dp_shard=8, recompute="full"), "deepseek-v3"),
        "sinks": plan_of(Layout(ep=4, dp_shard=4), "gpt-oss-20b"),
    }
    kinds = {"none": "NoneType", "full": "FullAC.Config", "selective": "SelectiveAC.Config"}
    cases = []
    for name, plan in plans.items():
        export(plan, "torchtitan").write(tmp_path / name)
        cases.append({"folder": str(tmp_path / name), "num_devices": plan.layout.world_size})
    for (name, plan), answer in zip(plans.items(), engine_reads("torchtitan_module", cases), strict=True):
        layout = plan.layout
        stages = answer["found"].pop("stages") if "found" in answer else None
        assert answer == {
            "found": {
                "degrees": [layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp, layout.ep],
                "checkpointing": kinds[layout.recompute],
                "microbatches": 1 if layout.pp > 1 else 16,
            }
        }, name
        assert layout.pp == 1 or [sum("layers" in part for part in stage) for stage in stages] == [
            sum(0 < idx <= plan.model.num_blocks for idx in stage.layer_idxs) for stage in plan.stages
        ]


def test_accelerate_takes_the_file(tmp_path: Path) -> None:
    layouts = (
        Layout(dp_replicate=2, dp_shard=2, tp=2, recompute="full", sequence_parallel=False),
        Layout(dp_shard=16, zero_stage=2),
        Layout(dp_shard=4, cp=2),
        Layout(dp_shard=8, offload="parameters"),
    )
    cases = []
    for idx, layout in enumerate(layouts):
        path = export(plan_of(layout), "accelerate").write(tmp_path / str(idx))[0]
        cases.append({"path": str(path), "num_devices": layout.world_size})
    for layout, answer in zip(layouts, engine_reads("accelerate_file", cases), strict=True):
        found = {
            "degrees": [layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp],
            "reshards": layout.zero_stage == 3,
            "checkpointing": layout.recompute == "full",
            "offloads": layout.offload == "parameters",
            "version": 2,
            "precision": "bf16",
            "nodes": 1,
        }
        assert answer == {"found": found}, layout


def test_deepspeed_takes_the_file(tmp_path: Path) -> None:
    layouts = (
        Layout(dp_shard=8, micro_batch_size=2),
        Layout(dp_replicate=8),
        Layout(dp_shard=8, zero_stage=2, offload="optimizer"),
        Layout(dp_shard=8, offload="optimizer", offload_fraction=0.25),
        Layout(dp_shard=8, offload="parameters", offload_to="storage"),
        Layout(dp_replicate=2, dp_shard=4, gradient_shard=8, optimizer_shard=8),
    )
    cases = []
    for idx, layout in enumerate(layouts):
        path = export(plan_of(layout), "deepspeed").write(tmp_path / str(idx))[0]
        cases.append({"path": str(path), "num_devices": layout.world_size})
    for layout, answer in zip(layouts, engine_reads("deepspeed_file", cases), strict=True):
        found = {
            "stage": layout.zero_stage,
            "micro_batch": layout.micro_batch_size,
            "microbatches": 16,
            "offloads": [layout.offload != "none", layout.offload == "parameters"],
            "second_partition": layout.dp_shard if layout.has_levels else 1,
            "bf16": True,
        }
        assert answer == {"found": found}, layout
