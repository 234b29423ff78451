"""Small models of every kind, each with the inputs of four samples: of transformers, and plain ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from foreign_models import PlainModel
from harness import Case, Outcome
from meshwright.runtime import parallelize
from meshwright.runtime.models.layers import full_tensor
from torch import Tensor, nn
from zoo_more import MORE
from zoo_others import OTHERS

BATCH, LENGTH = 4, 16
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}

Inputs = dict[str, Tensor]


def _tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 96, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def _images() -> Tensor:
    return torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def _of(name: str, **sizes: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        import transformers

        config = getattr(transformers, f"{name.partition('For')[0]}Config")(**{**TEXT, **sizes})
        return getattr(transformers, name)(config), {"input_ids": _tokens()}

    return build


def _gpt2() -> tuple[nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=4, n_head=4, n_positions=32, **ids)), {
        "input_ids": _tokens()
    }


def _t5() -> tuple[nn.Module, Inputs]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4)
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(), "decoder_input_ids": _tokens(1)}


def _vit() -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**VISION)), {"pixel_values": _images()}


def _whisper() -> tuple[nn.Module, Inputs]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {f"{part}_{key}": size for part in ("encoder", "decoder")
              for key, size in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    config = WhisperConfig(
        vocab_size=96, d_model=32, num_mel_bins=8, max_source_positions=LENGTH, max_target_positions=LENGTH, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **layers,
    )  # fmt: skip
    sounds = torch.randn(BATCH, 8, 2 * LENGTH, generator=torch.Generator().manual_seed(2))
    return WhisperForConditionalGeneration(config), {"input_features": sounds, "decoder_input_ids": _tokens()}


def _clip() -> tuple[nn.Module, Inputs]:
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig(text_config={**TEXT, "eos_token_id": 95}, vision_config=VISION)), {
        "input_ids": _tokens(),
        "pixel_values": _images(),
    }


def _llava() -> tuple[nn.Module, Inputs]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text, vision = LlamaConfig(**TEXT), CLIPVisionConfig(**VISION)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=5))
    image = torch.full((BATCH, 16), 5)  # patches
    return model, {"input_ids": torch.cat([image, _tokens().clamp(min=6)], dim=1), "pixel_values": _images()}


class Mixer(nn.Module):
    """Layers over tokens, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])
        self.tokens = nn.Sequential(nn.Linear(LENGTH, 24), nn.GELU(), nn.Linear(24, LENGTH))
        self.channels = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).mT).mT
        return x + self.channels(self.norms[1](x))


class Mixers(nn.Module):
    """MLP-mixer of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.blocks = nn.ModuleList([Mixer() for _ in range(3)])
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Peeking(PlainModel):
    """Reads a norm of its first block by itself, as DiT does."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.blocks[0].norm_1.weight.mean()


def _plain(module: type[nn.Module], *arguments: Any, **inputs: Tensor) -> Callable[[], tuple[nn.Module, Inputs]]:
    return lambda: (module(*arguments), inputs)


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "bert": _of("BertForMaskedLM"),
    "neox": _of("GPTNeoXForCausalLM"),
    "gpt2": _gpt2,
    "gemma": _of("GemmaForCausalLM", head_dim=8, **GROUPED),
    "phi3": _of("Phi3ForCausalLM", **GROUPED),
    "olmo2": _of("Olmo2ForCausalLM", **GROUPED),
    "cohere": _of("CohereForCausalLM", **GROUPED),
    "mixtral": _of("MixtralForCausalLM", num_local_experts=4, **GROUPED),
    "mamba": _of("MambaForCausalLM", state_size=4),
    "mamba2": _of("Mamba2ForCausalLM", state_size=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=8),
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
    "clip": _clip,
    "llava": _llava,
    "plain": _plain(PlainModel, tokens=_tokens()),
    "mixers": _plain(Mixers, images=_images()),
    "peeking": _plain(Peeking, tokens=_tokens()),
    **MORE,
    **OTHERS,
}


def build(name: str) -> tuple[nn.Module, Inputs]:
    """A model with the same random weights on every rank, norms included, without dropout, and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 0.7, 0.05)
    return model.eval(), inputs


def loss_of(output: Any) -> Tensor:
    """A mean over samples of whatever a model puts out first; of a contrastive one of the samples' own pairs."""
    value = (
        output if isinstance(output, Tensor) else next(v for v in output.values() if isinstance(v, Tensor) and v.ndim)
    )
    if "logits_per_image" in (() if isinstance(output, Tensor) else output):
        value = output.logits_per_image.diagonal()
    return value.float().square().mean()


def call(module: nn.Module, inputs: Inputs) -> Any:
    """Run a model on its inputs: plain ones take one, whatever its name."""
    return module(**inputs) if len(inputs) > 1 or hasattr(module, "config") else module(*inputs.values())


def one_step(case: Case, folder: Path) -> Outcome:
    """The gradients of one step under a plan, by the user's own loop; of a pipeline by `forward_backward` and a loss of batches."""
    plan = case.plan
    module, inputs = build(case.module)
    model = parallelize(module, plan, device=torch.device("cpu"), batch_loss=lambda output, _: loss_of(output))
    outcome = Outcome(stage=model.mesh.coordinates["pp"])
    mine = {name: tensor.chunk(plan.layout.dp)[model.mesh.dp_rank] for name, tensor in inputs.items()}
    if plan.layout.pp > 1:
        outcome.losses.append(model.forward_backward(mine if hasattr(module, "config") else list(mine.values())))
    else:
        for i in range(plan.num_microbatches):
            part = {name: tensor.chunk(plan.num_microbatches)[i] for name, tensor in mine.items()}
            (loss_of(call(model.module, part)) / plan.num_microbatches).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    outcome.gradients = {name.removeprefix("module."): full_tensor(grad).clone() for name, grad in gradients.items()}
    return outcome


def alone(name: str) -> dict[str, Tensor]:
    """The gradients of the same step on one rank."""
    module, inputs = build(name)
    loss_of(call(module, inputs)).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
