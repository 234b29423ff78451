"""Where Hugging Face's files hold the tensors of a Decoder: under which name, in which order of dimensions, fused or one by one.

| family                       | feed-forward part of block N, after ``model.layers.N.``                                        |
|------------------------------|------------------------------------------------------------------------------------------------|
| Llama, Qwen2, Qwen3, Mistral | as ours                                                                                        |
| Mixtral                      | ``block_sparse_moe.gate``, ``block_sparse_moe.experts.E.{w1, w3, w2}``: gate, up, down         |
| Qwen2-MoE, Qwen3-MoE, OLMoE  | ``mlp.gate``, ``mlp.experts.E.{gate, up, down}_proj``, ``mlp.shared_expert``, its gate         |
| DeepSeek-V2, DeepSeek-V3     | the same but ``mlp.shared_experts``                                                            |
| GPT-2                        | ``transformer.h.N``: ``ln_1, attn.c_attn, attn.c_proj, ln_2, mlp.c_fc, mlp.c_proj``, [in, out] |

Ours keeps the experts of a block in one tensor [E, ...]; the files have a tensor for each. GPT-2's c_attn is q, k and v side by
side.
Source: the published files, and what transformers 5.23's save_pretrained writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...schema.model import ModelSpec

_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp)\.experts\.(gate|up|down)_proj")
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_GPT2_OUTER = {
    "model.embed_tokens.weight": "transformer.wte.weight",
    "model.embed_positions.weight": "transformer.wpe.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "model.norm.bias": "transformer.ln_f.bias",
    "lm_head.weight": "lm_head.weight",
}
_GPT2_INNER = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_GPT2_FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
TIED_HEAD = "lm_head.weight"

_NOT_READ = re.compile(r".*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)|model\.layers\.(\d+)\..*")
"""Tables and masks that old files hold, and layers past the last: the multi-token-prediction modules of DeepSeek-V3."""


@dataclass(frozen=True)
class Piece:
    """A tensor of the files of which one of ours is, or is part of.

    Attributes:
        name, shape: in the files.
        row: which entry along our first dimension it is, where the files have a tensor for each; None for all of ours.
        start: where ours starts along its output dimension, in a tensor that holds several of ours.
        is_transposed: [in, out] in the files, [out, in] here.
    """

    name: str
    shape: tuple[int, ...]
    row: int | None = None
    start: int = 0
    is_transposed: bool = False

    def place(self, region: tuple[slice, ...]) -> tuple[slice, ...] | None:
        """Return the range of the file's tensor for a region of ours; None where nothing of it is there."""
        if any(part.start >= part.stop for part in region):
            return None
        if self.row is not None:
            if not region[0].start <= self.row < region[0].stop:
                return None
            region = region[1:]
        outputs = slice(self.start + region[0].start, self.start + region[0].stop)
        return (*region[1:], outputs) if self.is_transposed else (outputs, *region[1:])


def pieces_of(name: str, shape: tuple[int, ...], spec: ModelSpec) -> tuple[Piece, ...]:
    """Return the file's tensors that make up one of a Decoder's, given its name and full shape."""
    if spec.architecture == "GPT2LMHeadModel":
        return (_gpt2_piece(name, shape),)
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return (Piece(_block_name(name, spec.architecture), shape),)
    prefix, part = expert.groups()
    if spec.architecture == "MixtralForCausalLM":
        names = [f"{prefix[:-3]}block_sparse_moe.experts.{row}.{_MIXTRAL[part]}.weight" for row in range(shape[0])]
    else:
        names = [f"{prefix}.experts.{row}.{part}_proj.weight" for row in range(shape[0])]
    return tuple(Piece(stored, shape[1:], row=row) for row, stored in enumerate(names))


def pieces_of_model(shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces by our names; a tied output projection is not stored."""
    return {
        name: pieces_of(name, shape, spec)
        for name, shape in shapes.items()
        if not (spec.tie_embeddings and name == TIED_HEAD)
    }


def may_be_ignored(name: str, spec: ModelSpec) -> bool:
    """Tell whether files may hold a name that no tensor of the model has."""
    if spec.tie_embeddings and name == TIED_HEAD:
        return True
    match = _NOT_READ.fullmatch(name)
    return match is not None and (match[3] is None or int(match[3]) >= spec.num_blocks)


def without_prefix(name: str) -> str:
    """Return the name in files of the model without its head, as GPT-2 is published."""
    return re.sub(r"^(model|transformer)\.", "", name)


def _block_name(name: str, architecture: str) -> str:
    if architecture == "MixtralForCausalLM":
        return name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    if architecture.startswith("Deepseek"):
        return name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")
    return name


def _gpt2_piece(name: str, shape: tuple[int, ...]) -> Piece:
    if name in _GPT2_OUTER:
        return Piece(_GPT2_OUTER[name], shape)
    match = _BLOCK.fullmatch(name)
    assert match is not None, name
    number, module, kind = match.groups()
    is_transposed = len(shape) > 1
    if module in _GPT2_FUSED:
        place, width = _GPT2_FUSED.index(module), shape[0]
        fused = (shape[1], 3 * width) if is_transposed else (3 * width,)
        stored = f"transformer.h.{number}.attn.c_attn.{kind}"
        return Piece(stored, fused, start=place * width, is_transposed=is_transposed)
    stored = f"transformer.h.{number}.{_GPT2_INNER[module]}.{kind}"
    return Piece(stored, shape[::-1] if is_transposed else shape, is_transposed=is_transposed)
