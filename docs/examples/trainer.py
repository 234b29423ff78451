"""`transformers.Trainer` around a model that a plan has spread over data-parallel ranks, whole or sharded.

    meshwright plan docs/examples/tiny --cluster local --global-batch-size 8 --seq-len 32 --out plan.json
    meshwright apply plan.json docs/examples/trainer.py

The model is spread before the Trainer sees it, and `_is_accelerate_prepared` tells Accelerate, on which the Trainer is built,
not to wrap it again; a plain Accelerate loop takes the model in the same way. Each rank draws its own samples: the Trainer's data
loader would share them out once more. Under tensor parallelism set `max_grad_norm=0`: the Trainer's clipping does not take
parameters of which some are split (`meshwright.runtime.clip_gradients` does).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshwright.runtime import build_optimizer, parallelize
from meshwright.schema import TrainingPlan
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens of one data-parallel rank."""

    def __init__(self, dp_rank: int) -> None:
        generator = torch.Generator().manual_seed(dp_rank)
        self.tokens = torch.randint(0, 256, (64, 32), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[idx], "labels": self.tokens[idx]}


class OwnShare(Trainer):
    """Takes the data of each rank as they are."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size)


def main() -> None:
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    plan = TrainingPlan.load(os.environ["MESHWRIGHT_PLAN"])
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(Path(__file__).parent / "tiny")
    model = parallelize(AutoModelForCausalLM.from_config(config), plan)
    model.module._is_accelerate_prepared = True
    arguments = TrainingArguments(
        output_dir="trainer", max_steps=4, per_device_train_batch_size=plan.layout.micro_batch_size, logging_steps=2,
        save_strategy="no", report_to=[], use_cpu=model.device.type == "cpu", disable_tqdm=True,
    )  # fmt: skip
    trainer = OwnShare(
        model.module, arguments, train_dataset=Tokens(model.mesh.dp_rank),
        optimizers=(build_optimizer(model, learning_rate=1e-2), None),
    )  # fmt: skip
    result = trainer.train()
    if dist.get_rank() == 0:
        print(f"loss {result.training_loss:.4f} after {result.global_step} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
