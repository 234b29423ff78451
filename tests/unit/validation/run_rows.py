"""Rows of measured runs for tests."""

from __future__ import annotations

from pathlib import Path

from meshwright.validation import RunInputs, run_inputs
from meshwright.validation.rows import RunRow

SHARED = Path(__file__).resolve().parents[4] / "shared/data/measured_runs"


HEADER = (
    "id,source_set,decision_group,framework,gpu_type,gpus_per_node,inter_interconnect,n_gpus,model,"
    "model_family,layers,hidden,heads,kv_heads,ffn,vocab,params_b,seq_len,global_batch,micro_batch,dp,tp,pp,"
    "vpp,sharding_class,recompute_class,precision_class,iter_time_s,peak_mem_gib,mem_kind,status,quality,flag"
)


GPT = "Megatron-LM,A100-SXM-80GB,8,,8,gpt,GPT,24,2048,16,16,8192,51200,1.3"


GOOD = (
    f"a,s,g,{GPT},2048,64,2,4,2,1,1,none,none,fp16,2.0,20,max_allocated,ok,A,",
    f"b,s,g,{GPT},2048,64,1,8,1,1,1,zero1,full,fp16,3.0,,,ok,A,",
    f"c,s,g,{GPT},2048,64,64,8,1,1,1,none,none,fp16,,,,oom,B,",
    f"d,s,g,{GPT},2048,64,1,8,1,1,1,none,none,fp16,1.0,,,ok,C,",
)


def table(tmp_path: Path, *lines: str, header: str = HEADER) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


def a_row(**changes: object) -> RunRow:
    values = {
        "line": 2, "id": "x", "framework": "Megatron-LM", "gpu_type": "A100-SXM-80GB", "gpus_per_node": 8, "n_gpus": 16,
        "model": "gpt", "model_family": "GPT-3", "layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192,
        "vocab": 51200, "seq_len": 2048, "global_batch": 64, "micro_batch": 1, "dp": 4, "tp": 2, "pp": 2,
        "sharding_class": "zero1", "recompute_class": "full", "precision_class": "bf16", "seq_parallel": "no",
    }  # fmt: skip
    return RunRow(**{**values, **changes})  # type: ignore[arg-type]


def inputs_of(**changes: object) -> RunInputs:
    result = run_inputs(a_row(**changes))
    assert isinstance(result, RunInputs), result
    return result
