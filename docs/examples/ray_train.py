"""Ray Train starts the ranks, a plan spreads the model over them.

    meshwright plan docs/examples/tiny --cluster local --global-batch-size 8 --seq-len 32 --out plan.json
    python docs/examples/ray_train.py plan.json --steps 3

Ray starts one worker a rank and joins them in a process group; each runs `train_on_rank`. The plan travels in the configuration, so
that no storage need be shared. Ranks of a tensor-parallel group should be on one node: ask for whole nodes
(`resources_per_worker`, `placement_strategy="PACK"`). Run with Ray 2.60.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshwright.runtime import build_optimizer, clip_gradients, parallelize
from meshwright.schema import TrainingPlan
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from transformers import AutoConfig, AutoModelForCausalLM


def train_on_rank(settings: dict[str, Any]) -> None:
    """What every worker does; the process group is there."""
    plan = TrainingPlan(**json.loads(settings["plan"]))
    torch.manual_seed(0)  # the same weights on every rank
    config = AutoConfig.from_pretrained(Path(__file__).parent / "tiny")
    model = parallelize(AutoModelForCausalLM.from_config(config), plan)
    optimizer = build_optimizer(model, learning_rate=1e-2)
    for step in range(settings["steps"]):
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    plan = TrainingPlan.load(arguments.plan)
    on_gpu = plan.cluster.weakest_device.backend == "nccl"
    trainer = TorchTrainer(
        train_on_rank,
        train_loop_config={"plan": plan.model_dump_json(), "steps": arguments.steps},
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=plan.layout.world_size, use_gpu=on_gpu),
        run_config=RunConfig(storage_path=str(Path("ray").resolve())),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
