"""What a framework does where a row does not say: one table per choice, each line with its reason.

The first line that matches the start of the framework's name counts. These are facts about frameworks, recipes and their time;
nothing here is chosen to make a prediction fit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..schema.task import Precision


class Default(NamedTuple):
    """What a framework does where nobody says otherwise, and why that is known."""

    frameworks: str
    choice: Any
    why: str


RECOMPUTE: tuple[Default, ...] = (
    Default("torchtitan", "selective", "activation_checkpoint.mode defaults to selective"),
    Default("MaxText", "full", "remat_policy: full in base.yml"),
    Default("Pax", "full", "checkpoint_policy SAVE_NOTHING of the GPT configs"),
    Default("GPT-?NeoX", "full", "checkpoint_activations: true in every published config"),
    Default("LLaMA-?Factory|Unsloth|xtuner|levanter", "full", "gradient checkpointing is on unless disabled"),
    Default("torchtune", "full", "enable_activation_checkpointing: True in the full fine-tuning recipes"),
    Default("Alpa", "full", "its GPT benchmarks rematerialise every layer"),
    Default("Primus.*: FSDP", "full", "AMD's recipes with FSDP=1 pass RECOMPUTE=1"),
    Default(
        "(Megatron-Bridge|Megatron-Core|NeMo).*: latent",
        "selective",
        "Megatron-Bridge, scripts/performance/configs/deepseek: recompute_modules mla_up_proj or mlp on every device but one",
    ),
    Default("Megatron|NeMo|Primus|Pai|FlagScale", "none", "recompute_granularity is None unless set"),
    Default("nanotron", "none", "recompute_layer: false"),
    Default("", "none", "autograd keeps what it needs unless told otherwise"),
)
SHARDING: tuple[Default, ...] = (
    Default("Megatron-Bridge|Megatron-Core|NeMo", "zero1", "the recipes turn the distributed optimizer on"),
    Default("torchtitan|llm-foundry|fms-fsdp|.*FSDP", "zero3", "FSDP shards everything unless told otherwise"),
    Default("LLM.?Foundry|Composer|OLMo|torchtune|levanter|MaxText|veScale", "zero3", "fully sharded by default"),
    Default("LitGPT|lit-gpt|Lightning", "zero3", "FSDPStrategy on more than one device"),
    Default("Primus|FlagScale|MindSpeed|Pai", "zero1", "--use-distributed-optimizer in the shipped scripts"),
    Default("GPT-?NeoX", "zero1", "zero_optimization.stage: 1 in the published configs"),
    Default("InternEvo", "zero1", "parallel.zero1 of the shipped configs"),
    Default("", "none", "plain data parallelism keeps everything whole"),
)
SEQUENCE_PARALLEL: tuple[Default, ...] = (
    Default("Megatron-Bridge|Megatron-Core|NeMo|Pai|Primus|FlagScale", True, "the recipes turn it on with tp"),
    Default("nanotron", True, "tp_mode REDUCE_SCATTER in scripts/scaling_benchmarks.py"),
    Default("torchtitan", True, "its tensor-parallel plans shard the sequence"),
    Default("MindSpeed|veScale", True, "--sequence-parallel in the shipped scripts, and by design"),
    Default("", False, "all-reduce, as Megatron-LM did first"),
)
PRECISION: tuple[Default, ...] = (
    Default(r"Megatron-DeepSpeed \(Sailor\)", "fp32", "its ds_config.json turns neither fp16 nor bf16 on"),
    Default("Megatron-DeepSpeed|Megatron-LM|LiBai|Aceso", "fp16", "their example scripts pass --fp16"),
    Default("GPT-?NeoX|Alpa|Colossal-?AI", "fp16", "fp16 in their published configs and benchmarks"),
    Default("", "bf16", "what current engines train in"),
)
UNFUSED_ATTENTION: tuple[Default, ...] = (
    Default(r"Megatron-LM \((SC21|Jan 2021|MLSys23)", True, "written before FlashAttention"),
    Default("Megatron-DeepSpeed|HF Transformers|LiBai|Aceso", True, "unfused scores unless --use-flash-attn"),
    Default("GPT-?NeoX|Alpa", True, "attention_config global is unfused; Alpa has no fused kernel"),
    Default("", False, "fused attention is the default of its time"),
)
FLASH_GENERATION: tuple[Default, ...] = (
    Default("llm-foundry", 1, "scripts/train/benchmarking/submit_benchmarks.py: --attn_impl triton"),
    Default("", 2, "FlashAttention-2 or what the engine has newer"),
)
DROPOUT: tuple[Default, ...] = (
    Default(
        r"Megatron-LM \((SC21|Jan 2021|MLSys23)|Megatron-DeepSpeed$|Aceso",
        True,
        "hidden_dropout is 0.1 in their arguments.py",
    ),
    Default("", False, "current recipes train without"),
)
FUSION: tuple[Default, ...] = (
    Default("torchtitan", "composite_norm", "compile is off unless set; RMSNorm is one kernel from torch 2.8 on"),
    Default(
        "LitGPT|HF |EasyContext|LLaMA-Factory|[Aa]xolotl|[Aa]ccelerate|PEFT", "eager", "model code in plain PyTorch"
    ),
    Default("fms-fsdp", "compiled", "use_torch_compile: true"),
    Default("", "engine", "kernels the engine brings"),
)
COMPILED: tuple[Default, ...] = (
    Default(
        "torchtitan.*_2024",
        "compiled_blocks",
        "torchtitan compiled no loss from 2024-12-18 (#755) to 2025-04-02 (#1033), when its benchmarks of 2024 were made",
    ),
    Default("", "compiled", "blocks and loss"),
)
"""What torch.compile compiled, by framework and place of publication."""

BALANCED_STAGES: tuple[Default, ...] = (
    Default("nanotron", True, "blocks are placed by get_block_compute_costs"),
    Default("Megatron-LM 1F1B redis", True, "layers redistributed to level the vocabulary layers (arXiv:2411.05288)"),
    Default("", False, "layers / pp blocks on every stage, embedding and head on top"),
)

EXPERTS_FOLLOW_TP: tuple[Default, ...] = (
    Default(
        "Megatron-Bridge|Megatron-Core/NeMo", False, "Megatron-Bridge's recipes set expert_tensor_parallel_size = 1"
    ),
    Default(
        "Megatron|NeMo|Pai|Primus|FlagScale",
        True,
        "expert_tensor_parallel_size is tensor_model_parallel_size unless set",
    ),
    Default("", False, "whole experts: expert_tensor_parallel_degree is 1 in torchtitan, others have no such axis"),
)

PRECISIONS: dict[str, Precision] = {
    "bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "fp8", "mxfp8": "fp8", "fp32": "fp32", "nvfp4": "nvfp4",
}  # fmt: skip

ENGINE: tuple[Default, ...] = (
    Default("$|meshwright", "fsdp2", "a table that names no framework holds runs of our own runtime"),
    Default(
        "torchtitan|llm-foundry|fms-fsdp|.*FSDP|LitGPT", "fsdp2", "torch's fully sharded data parallelism and kernels"
    ),
    Default("nanotron", "nanotron", "its own engine"),
    Default("InternEvo", "internevo", "its own engine"),
    Default(
        "LLM.?Foundry|Composer|OLMo|torchtune|lit-gpt|Lightning|PyTorch|veScale|LLaMA-?Factory|Axolotl|Unsloth"
        "|.*Accelerate|HF Trainer",
        "fsdp2",
        "torch's fully sharded data parallelism and kernels",
    ),
    Default(
        ".*DeepSpeed|HF Transformers|Colossal-?AI|xtuner|GPT-?NeoX", "deepspeed", "Python hooks around every module"
    ),
    Default("Aceso", "aceso", "every operator of Megatron is a module of its own"),
    Default("", "megatron", "Megatron's kernels, Python modules and distributed optimizer, or descended from them"),
)

GRADIENTS: tuple[Default, ...] = (
    Default(
        "Megatron-Bridge|Megatron-Core|NeMo",
        "compute",
        "scripts/performance set grad_reduce_in_fp32 = False; NeMo 1's distributed_fused_adam has grad_sync_dtype: bf16",
    ),
    Default(".*DeepSpeed|HF Transformers|ColossalAI", "compute", "ZeRO reduces in the dtype of the model"),
    Default("InternEvo|PaddleNLP", "compute", "gradients in the dtype of the parameters"),
    Default("fms-fsdp", "compute", "policies/mixed_precision.py: reduce_dtype bfloat16"),
    Default(
        r"Megatron-LM \((SC21|Jan 2021|MLSys23)|LiBai|Aceso",
        "compute",
        "gradients of fp16 weights are reduced as they are",
    ),
    Default("", "fp32", "accumulate_allreduce_grads_in_fp32, which Megatron-LM turns on for bf16"),
)

OVERLAP: tuple[Default, ...] = (
    Default(
        r"Megatron-LM \((SC21|Jan 2021|MLSys23)|LiBai|Aceso",
        False,
        "before --overlap-grad-reduce and overlapped transfers (2023): gradients are reduced after the backward pass",
    ),
    Default("Megatron-LM$", False, "--overlap-grad-reduce is off unless set"),
    Default("", True, "on in the recipes, or the engine's own way"),
)

TP_OVERLAP: tuple[Default, ...] = (
    Default(
        "NeMo",
        True,
        "MegatronCommOverlapCallback(tp_comm_overlap=True) in NeMo's performance recipes, and in MLPerf's configs",
    ),
    Default(
        "Megatron-Core/NeMo|Megatron-Bridge", True, "CommOverlapConfig(tp_comm_overlap=True) in scripts/performance"
    ),
    Default("", False, "tp_comm_overlap needs Transformer Engine's userbuffers and is off unless set"),
)

CUDA_GRAPHS: tuple[Default, ...] = (
    Default("NeMo/Megatron$", True, "MCORE_CUDA_GRAPH=1 in NVIDIA's MLPerf configs, a graph for every layer"),
    Default("", False, "off unless set"),
)

FP8_ACTIVATION_INPUT: tuple[Default, ...] = (
    Default(
        "NeMo/Megatron: adapters, cp 1$",
        True,
        "FP8_ACT=1 in MLPerf's configurations of one node for Llama-2-70B LoRA (config_DGXB200_1x8x1xtp1pp1cp1.sh)",
    ),
    Default("", False, "activation_func_fp8_input_store is off unless set"),
)

PACKED_DOCUMENT: tuple[Default, ...] = (
    Default(
        "Megatron-Core/NeMo|NeMo/Megatron-Core|Megatron-Bridge", 256, "fine-tuning recipes pack SQuAD's short examples"
    ),
    Default("", None, "one document a sequence"),
)
"""Tokens of a document in the sequences of fine-tuning."""


def default_of(framework: str, table: tuple[Default, ...]) -> Any:
    """The choice of the first line of a table that matches the start of the framework's name."""
    return next(line.choice for line in table if re.match(line.frameworks, framework, re.IGNORECASE))


@dataclass
class Assumed:
    """Looks defaults up and remembers which were taken."""

    framework: str
    taken: list[str] = field(default_factory=list)

    def default(self, name: str, table: tuple[Default, ...], detail: str = "") -> Any:
        """The framework's choice, noted as ``name=choice``; ``detail`` follows the framework's name where a table looks at more."""
        choice = default_of(self.framework + detail, table)
        self.taken.append(f"{name}={choice}")
        return choice
