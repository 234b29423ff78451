"""The options of Megatron-LM that export writes, as its parser has them.

Source: NVIDIA/Megatron-LM, main at d98e8a64dd (2026-08-22, core 0.20 in the making), `add_megatron_arguments` of
megatron/training/arguments.py.
"""

from __future__ import annotations

import argparse

FLAGS = [
    "group-query-attention",
    "add-qkv-bias",
    "qk-layernorm",
    "multi-latent-attention",
    "use-rope-scaling",
    "untie-embeddings-and-output-weights",
    "swiglu",
    "squared-relu",
    "openai-gelu",
    "disable-bias-linear",
    "moe-router-pre-softmax",
    "moe-router-enable-expert-bias",
    "moe-shared-expert-gate",
    "moe-grouped-gemm",
    "bf16",
    "fp16",
    "sequence-parallel",
    "use-distributed-optimizer",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "tp-comm-overlap",
    "recompute-activations",
    "optimizer-cpu-offload",
    "use-precision-aware-optimizer",
]

INTEGERS = [
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "kv-channels",
    "num-query-groups",
    "q-lora-rank",
    "kv-lora-rank",
    "qk-head-dim",
    "qk-pos-emb-head-dim",
    "v-head-dim",
    "max-position-embeddings",
    "rotary-base",
    "vocab-size",
    "make-vocab-size-divisible-by",
    "num-experts",
    "moe-ffn-hidden-size",
    "moe-router-topk",
    "moe-router-num-groups",
    "moe-router-group-topk",
    "moe-shared-expert-intermediate-size",
    "seq-length",
    "micro-batch-size",
    "global-batch-size",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "hierarchical-context-parallel-sizes",
    "num-distributed-optimizer-instances",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "num-virtual-stages-per-pipeline-rank",
    "num-layers-per-virtual-pipeline-stage",
    "recompute-num-layers",
    "mtp-num-layers",
]

NUMBERS = [
    "norm-epsilon",
    "rotary-percent",
    "rope-scaling-factor",
    "rotary-scaling-factor",
    "mscale",
    "mscale-all-dim",
    "moe-router-topk-scaling-factor",
    "attention-dropout",
    "hidden-dropout",
    "optimizer-offload-fraction",
]

TEXTS: dict[str, tuple[str, ...]] = {
    "window-size": (),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "rope-type": ("rope", "yarn"),
    "moe-layer-freq": (),
    "moe-router-score-function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "moe-router-dtype": ("fp32", "fp64"),
    "fp8-format": ("e4m3", "hybrid"),
    "optimizer": ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
    "attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "cp-comm-type": (),
    "pipeline-model-parallel-layout": (),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "recompute-modules": (),
}
"""Option -> what it may be; empty: any text."""


def megatron_parser() -> argparse.ArgumentParser:
    """A parser that takes these options and no others."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    for name in INTEGERS:
        many = name == "hierarchical-context-parallel-sizes"
        parser.add_argument(f"--{name}", type=int, nargs="+" if many else None)
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=float)
    for name, choices in TEXTS.items():
        many = name in ("cp-comm-type", "recompute-modules")
        parser.add_argument(f"--{name}", choices=choices or None, nargs="+" if many else None)
    return parser
