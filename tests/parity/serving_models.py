"""Tiny models of transformers with weights that decide clearly, saved where our engine reads them, and what they generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from meshwright.runtime.serving.engine import ServingEngine
from meshwright.runtime.serving.requests import Request
from meshwright.schema.serving import EngineLimits, Pool, ServingLayout

VOCABULARY = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": _LATENT,
}


def save_model(family: str, folder: Path) -> Any:
    """Write a model; return it as transformers has it."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **FAMILIES[family]})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def make_prompts(lengths: Sequence[int], *, seed: int = 1) -> list[tuple[int, ...]]:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()) for length in lengths]


def generated(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return what transformers generates for each prompt alone, greedily."""
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def make_pool(*, layout: ServingLayout | None = None, **limits: Any) -> Pool:
    """Return a pool of one instance in fp32 with small limits."""
    chosen = {"max_batch": 4, "max_batched_tokens": 16, "chunk": 8, "block_size": 4, "cache_blocks": 60, **limits}
    return Pool(
        device="cpu", replicas=1, layout=layout or ServingLayout(), weights="fp32", cache="fp32",
        limits=EngineLimits(**chosen),
    )  # fmt: skip


def answers(engine: ServingEngine, requests: Sequence[Request]) -> list[list[int]]:
    """Submit requests at once and step to their end; return the tokens of each."""
    names = [engine.submit(request) for request in requests]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_work:
        for event in engine.step():
            if event.token is not None:
                tokens[event.request].append(event.token)
    return [tokens[name] for name in names]
