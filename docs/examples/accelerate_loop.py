"""A loop of Hugging Face Accelerate around a model that a plan has spread over data-parallel ranks, whole or sharded.

    meshwright apply plan.json docs/examples/accelerate_loop.py --steps 3

The model is spread before Accelerate sees it; `_is_accelerate_prepared` tells it so. Gradients are clipped by
`meshwright.runtime.clip_gradients`, which knows the plan's axes.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from meshwright.runtime import build_optimizer, clip_gradients, parallelize
from meshwright.schema import TrainingPlan
from transformers import AutoModelForCausalLM, LlamaConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    plan = TrainingPlan.load(os.environ["MESHWRIGHT_PLAN"])

    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    spread = parallelize(AutoModelForCausalLM.from_config(config), plan, device=accelerator.device)
    spread.module._is_accelerate_prepared = True
    model, optimizer = accelerator.prepare(spread.module, build_optimizer(spread, learning_rate=1e-2))

    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + spread.mesh.dp_rank)
        tokens = torch.randint(0, 256, (plan.layout.micro_batch_size, 32), generator=generator).to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norm = clip_gradients(spread, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        if accelerator.is_main_process:
            print(f"step {step} loss {mean.item():.4f} norm {norm:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
