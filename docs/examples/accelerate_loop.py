"""A loop of Hugging Face Accelerate around a model that a plan has spread over data-parallel ranks, whole or sharded.

    meshwright plan docs/examples/tiny --cluster local --global-batch-size 8 --seq-len 32 --out plan.json
    meshwright apply plan.json docs/examples/accelerate_loop.py --steps 3

The model is spread before Accelerate sees it; `_is_accelerate_prepared` tells it so. Gradients are clipped by
`meshwright.runtime.clip_gradients`, which knows the plan's axes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from meshwright.runtime import build_optimizer, clip_gradients, parallelize
from meshwright.schema import TrainingPlan
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    plan = TrainingPlan.load(os.environ["MESHWRIGHT_PLAN"])

    torch.manual_seed(0)  # the same weights on every rank
    config = AutoConfig.from_pretrained(Path(__file__).parent / "tiny")
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
