"""A strategy for Lightning that spreads the model as a plan says: data, sharded data and tensor parallelism.

    meshwright plan docs/examples/tiny --cluster local --global-batch-size 8 --seq-len 32 --out plan.json
    meshwright apply plan.json docs/examples/lightning_strategy.py --steps 3

`PlanStrategy` is Lightning's ModelParallelStrategy with the plan's degrees; the module spreads itself in `configure_model`, which
Lightning has for that. Written for Lightning 2.6.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from meshwright.runtime import build_optimizer, clip_gradients, parallelize
from meshwright.runtime.parallel_model import ParallelModel
from meshwright.schema import RuntimeMismatchError, TrainingPlan
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM


class PlanStrategy(ModelParallelStrategy):
    """Joins the ranks and gives the model its plan. Lightning's own mesh has the same ranks side by side: tp goes fastest."""

    def __init__(self, plan: TrainingPlan) -> None:
        if plan.layout.pp > 1:
            raise RuntimeMismatchError("Lightning calls forward and backward itself: a pipeline needs both at once")
        layout = plan.layout
        super().__init__(data_parallel_size=layout.world_size // layout.tp, tensor_parallel_size=layout.tp)
        self.plan = plan

    def spread(self, model: torch.nn.Module) -> ParallelModel:
        """The model on this rank."""
        return parallelize(model, self.plan, device=self.root_device)


class LanguageModel(LightningModule):
    """Next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(0)  # the same weights on every rank
        config = AutoConfig.from_pretrained(Path(__file__).parent / "tiny")
        self.spread = self.trainer.strategy.spread(AutoModelForCausalLM.from_config(config))
        self.model = self.spread.module

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.spread, learning_rate=1e-2)

    def training_step(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        assert self.model is not None
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        if self.trainer.is_global_zero:
            print(f"step {step} loss {mean.item():.4f}")
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        clip_gradients(self.spread, max_norm=1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    plan = TrainingPlan.load(os.environ["MESHWRIGHT_PLAN"])
    tokens = torch.randint(0, 256, (64, 32), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), strategy=PlanStrategy(plan), max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    # Lightning shares the sequences out to the data-parallel ranks of its strategy.
    trainer.fit(LanguageModel(), DataLoader(tokens, batch_size=plan.layout.micro_batch_size))


if __name__ == "__main__":
    main()
