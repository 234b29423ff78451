"""Words of the page with their meanings, which pointing at them shows: those of docs/glossary.md, which a test compares."""

from __future__ import annotations

TERMS = {
    "data parallel": "ranks that see different sequences",
    "tensor parallel": "ranks that share every layer: heads, widths",
    "context parallel": "ranks that share each sequence: a ring, an exchange of heads (Ulysses), or both",
    "expert parallel": "ranks that share the experts of a layer; that share one expert",
    "sequence parallel": "activations between tensor-parallel regions, split over tp along the sequence",
    "ZeRO stage": "what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters",
    "stage": "consecutive layers on one pipeline rank",
    "model chunk": "one of several stages that a pipeline rank holds",
    "micro-batch": "sequences of one pass; passes of one step",
    "schedule": "order in which pipeline ranks run forward, backward and weight passes",
    "bubble": "waiting while a pipeline fills and drains",
    "recompute": "activations made again in the backward pass: `none`, `selective`, `full`, `mixed`",
    "offload": "states, parameters or activations that wait in host memory or on storage",
    "layout": "degrees and global choices of one way to parallelize a step",
    "estimate": "predicted seconds and bytes of a layout",
    "certificate": "objective, bound and gap of a search",
    "bound": "no layout is better",
    "optimality gap": "what the search leaves open, as a part of the objective",
    "Pareto front": "layouts that no other one beats in both of two objectives",
    "marginal value": "what a little more of a resource saves: the dual of a linear program (shadow price)",
    "link level": "a domain of devices that reach each other over one kind of link; domains nest",
    "rank map": "which device runs which rank",
    "adapters": "low-rank matrices trained in place of the frozen ones (LoRA, QLoRA)",
}

PAGE_TERMS = {
    "MFU": "model FLOPs utilisation: the FLOPs that the model needs, without recompute, over the peak of all devices",
    "interval": "nine of ten runs lie within it; from published measurements",
    "roofline": "the rate that a kernel can reach at most: memory bandwidth times its FLOPs per byte, up to the peak",
    "runner-up": "a layout that was costed exactly and not chosen",
    "exposed": "time that nothing else hides",
}
"""Words of this page only."""

FIELD_TERMS = {
    "dp_shard": "data parallel",
    "dp_replicate": "data parallel",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "cp_ulysses": "context parallel",
    "ep": "expert parallel",
    "etp": "expert parallel",
    "pp": "stage",
    "num_model_chunks": "model chunk",
    "micro_batch": "micro-batch",
    "zero": "ZeRO stage",
    "sequence_parallel": "sequence parallel",
    "recompute": "recompute",
    "offload": "offload",
    "1f1b": "schedule",
}
"""Words of a layout as it is printed, and their terms."""


def meaning(term: str) -> str:
    """Return the meaning of a term; empty where it has none."""
    return (TERMS | PAGE_TERMS).get(term, "").replace("`", "")


def meaning_of_field(word: str) -> str:
    """Return the meaning of a word of a layout, such as ``tp=8``; one without ``=`` is a schedule."""
    name, equals, _ = word.partition("=")
    term = FIELD_TERMS.get(name, "" if equals else "schedule")
    return f"{term}: {meaning(term)}" if term else ""
