"""A plain torch loop around a model of transformers, spread as a plan says.

    meshwright plan docs/examples/tiny --cluster local --global-batch-size 8 --seq-len 32 --out plan.json
    meshwright apply plan.json docs/examples/train_loop.py --steps 3

`apply` starts one process a device; each runs this script. Works under data, sharded data and tensor parallelism; with a pipeline
use `model.forward_backward(tokens)` in the place of forward and backward.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from meshwright.runtime import build_optimizer, clip_gradients, parallelize
from meshwright.schema import TrainingPlan
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    plan = TrainingPlan.load(os.environ["MESHWRIGHT_PLAN"])

    torch.manual_seed(0)  # the same weights on every rank
    config = AutoConfig.from_pretrained(Path(__file__).parent / "tiny")
    model = parallelize(AutoModelForCausalLM.from_config(config), plan)  # model.module is the LlamaForCausalLM, spread
    optimizer = build_optimizer(model, learning_rate=1e-2)

    for step in range(steps):
        # Every dp rank has its own share of the batch, and all tp ranks of it the same one.
        generator = torch.Generator().manual_seed(1000 * step + model.mesh.dp_rank)
        tokens = torch.randint(0, 256, (plan.layout.micro_batch_size, 32), generator=generator).to(model.device)
        loss = model.module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = clip_gradients(model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item() / dist.get_world_size():.4f} norm {norm:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
