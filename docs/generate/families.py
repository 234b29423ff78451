"""docs/reference/families.md: the known families of models, from schema/catalogue/families.toml."""

from __future__ import annotations

from markdown import table
from meshwright.schema.hf import Family, families

STATES = {
    "linear": "linear attention",
    "selective_scan": "selective scan",
    "short_convolution": "short convolutions",
    "gated_recurrence": "gated recurrences",
}


def page() -> str:
    """Return the page."""
    known = families()
    rows = [
        (f"`{family.architecture}`", f"`{name}`", ", ".join(parts(family)), "; ".join(family.also))
        for name, family in sorted(known.items(), key=lambda item: item[1].architecture.lower())
    ]
    lines = "\n".join(table(("architecture", "model_type", "blocks", "besides"), rows))
    return f"""# Families of models

The {len(known)} families whose `config.json` is read as it is published ([models](../models.md)); all others
that transformers can build are traced. Each has exactly as many parameters as transformers' model of the same configuration.
The last column has what a family's code does besides its layers, without parameters and at no cost worth counting: such models
are planned, but neither our runtime's own models nor Megatron's exporter are them.

{lines}
"""


def parts(family: Family) -> list[str]:
    """Return what the blocks of a family are made of, beside plain attention and a dense feed-forward part."""
    if family.text_model is not None:
        return [f"its text model, `{family.text_model}`"]
    names = {*family.defaults, *family.reads, *family.names.values()}
    sizes = {name for size in family.sizes for name in size.split("|")}
    is_split = "kv_lora_rank" in sizes
    state = [] if family.state is None else [STATES[family.state.mixer["kind"]]]
    only_state = family.mlp.get("ffn_dim") == 0
    plain = [] if only_state else ["latent attention" if is_split else "attention"]
    switches = {
        "in windows": {"sliding_window", "attention_chunk_size"} & names and not only_state,
        "gated": "gate" in family.attention,
        "normed queries and keys": "qk_norm" in family.attention or any("norms_" in name for name in names),
        "sinks": family.attention.get("sinks"),
        "side by side": family.block.get("parallel_residual") or "use_parallel_residual" in names,
        "experts": "num_experts" in sizes or "num_experts" in names,
        "shared experts": {"n_shared_experts", "shared_expert_intermediate_size"} & names,
        "no feed-forward part": only_state,
    }
    return [*state, *plain, *(text for text, holds in switches.items() if holds)]
