"""Batches of documents on mixed groups of ranks against one document after the other on one rank.

The reference knows no packs: plain decoder, each document by itself, the sum of all token losses divided once. Losses and every
gradient agree to 1e-5 (seen: 1e-6), whatever the groups and the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from foreign_models import build, spec_of
from harness import LEARNING_RATE, SEED, Case, Outcome, by_world_size, run_group
from meshwright.planner.batch import with_length_costs
from meshwright.profilers.module.structure import find_structure
from meshwright.runtime import Decoder, build_optimizer, parallelize
from meshwright.runtime.documents.packs import Batch
from meshwright.runtime.documents.user_attention import require_user_documents
from meshwright.runtime.models.decoder import init_weights
from meshwright.runtime.models.layers import full_tensor
from meshwright.runtime.training.memory import MemoryMeter
from meshwright.runtime.training.options import TrainOptions
from meshwright.runtime.training.rank_part import build_part
from meshwright.runtime.training.train import TrainingRun, train_to_the_end
from meshwright.schema import Layout, RuntimeMismatchError
from meshwright.schema.layers import MoE
from meshwright.solvers.batch_groups import BatchGroup
from plans import gpt2_model, make_plan, tiny_model
from test_parity import MODELS, Setup
from torch import nn

TOLERANCE = 1e-5
TIED = ("lm_head.weight", "model.embed_tokens.weight")
LENGTHS = (23, 5, 1, 12, 20, 3, 9, 2, 16)
MODELS["exchanging"] = tiny_model(num_blocks=2, num_heads=4, num_kv_heads=2, tied=True)
MODELS["ring"] = tiny_model(num_blocks=2, num_heads=3, num_kv_heads=3, head_dim=8)
MODELS["four blocks"] = tiny_model(num_blocks=4, num_heads=3, num_kv_heads=3, head_dim=8)
MODELS["learned positions"] = gpt2_model()
MODELS["routed"] = tiny_model(num_blocks=2, experts=MoE(num_experts=8, top_k=2, ffn_dim=32))


def group(first: int, size: int, *sequences: int) -> BatchGroup:
    return BatchGroup(first, size, sequences, 0.0)


ONE = ((group(0, 1, 0, 3), group(0, 1, 1, 2, 4)), (group(0, 1, *range(5, 9)),))
TWO = (
    (group(0, 2, 0, 2, 1),),
    (group(0, 1, 3, 5), group(1, 1, 4)),
    (group(1, 1, 6, 7),),
    (group(0, 2, 8),),
)
FOUR = (
    (group(0, 4, 0, 2),),
    (group(0, 2, 4, 1), group(2, 2, 8)),
    (group(0, 2, 3), group(2, 1, 5), group(3, 1, 6)),
    (group(2, 1, 7),),
)
PIPELINE = (
    (group(0, 1, 5, 7),),
    (group(0, 1, 0, 6, 2),),
    (group(0, 1, 4, 1, 3),),
    (group(0, 1, 8),),
)
TWO_PIPELINES = (
    (group(0, 1, 4, 2), group(1, 1, 0)),
    (group(0, 1, 3, 1, 6), group(1, 1, 5, 7)),
    (group(1, 1, 8),),
)
PIPELINE_OF_TWO = ((group(0, 2, 0, 2, 5),), (group(0, 2, 3, 1, 6, 7),), (group(0, 2, 4, 8),))


def groups_of(layout: Layout, step: int) -> tuple[tuple[BatchGroup, ...], ...]:
    """Return groups for a layout; the second step has one micro-batch more."""
    if layout.pp == 1:
        groups = {1: ONE[1:] + tuple((entry,) for entry in ONE[0]), 2: TWO, 4: FOUR}[layout.dp * layout.cp]
    else:
        groups = {(1, 1): PIPELINE, (2, 1): TWO_PIPELINES, (1, 2): PIPELINE_OF_TWO}[layout.dp, layout.cp]
        groups += ((),) * (layout.num_model_chunks * step)
    return groups


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(0, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(step))


def one_by_one(case: Case, folder: Path) -> Outcome:
    """Train on one document after the other, two steps of SGD."""
    if case.module:
        foreign = build(case.module)
        return _one_by_one(case, foreign, lambda tokens: foreign(tokens).logits)
    decoder = Decoder(case.plan.model)
    init_weights(decoder, SEED)
    return _one_by_one(case, decoder, decoder)


def _one_by_one(case: Case, decoder: nn.Module, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
    outcome = Outcome()
    for step in range(case.num_steps):
        documents = tokens_of(step).split(list(LENGTHS))
        total = torch.zeros(())
        for document in documents:
            if len(document) > 1:
                logits = logits_of(document[None, :-1])
                total += F.cross_entropy(logits[0].float(), document[1:], reduction="sum")
        decoder.zero_grad()
        loss = total / (sum(LENGTHS) - len(LENGTHS))
        loss.backward()
        outcome.losses.append(loss.item())
        gradients = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
        outcome.gradients.update({f"{step} {name}": gradient for name, gradient in gradients.items()})
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter -= LEARNING_RATE * parameter.grad
    return outcome


def on_groups(case: Case, folder: Path) -> Outcome:
    """Do the same by `backward_batch`, in a loop of one's own."""
    plan = case.plan
    module = build(case.module) if case.module else None
    model = parallelize(module, plan, device=torch.device("cpu"), seed=SEED, documents=True)
    optimizer = build_optimizer(model, learning_rate=LEARNING_RATE, weight_decay=0.0)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    outcome = Outcome()
    for step in range(case.num_steps):
        optimizer.zero_grad()
        share = model.backward_batch(Batch.of(tokens_of(step), ends, groups_of(plan.layout, step)))
        model.add_over_ranks(share)
        outcome.losses.append(share.item())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                outcome.gradients[f"{step} {name}"] = full_tensor(parameter.grad).clone()
        optimizer.step()
    return outcome


DOCUMENT_LENGTHS = (40, 7, 30, 2, 25, 33, 12, 5, 19)


def train_on_files(case: Case, folder: Path) -> Outcome:
    """Train by the built-in loop on documents in files, six steps; a case that ``saves`` stops after three and goes on."""
    data = folder / f"texts of {dist.get_rank()}"
    data.mkdir(exist_ok=True)
    for idx, size in enumerate(DOCUMENT_LENGTHS):
        (data / f"{idx}.txt").write_text("".join(chr(97 + (idx * 7 + i * i) % 26) for i in range(size)))
    options = TrainOptions(
        steps=6, learning_rate=1e-2, schedule="constant", warmup_steps=1, data=(str(data),), documents=True
    )
    runs = [options]
    if case.saves:
        halves = options.replace(checkpoint_dir=str(folder / case.name), checkpoint_every=3)
        runs = [halves.replace(steps=3), halves.replace(resume=True)]
    outcome, device = Outcome(), torch.device("cpu")
    for idx, each in enumerate(runs):
        report = folder / f"{case.name} {idx}.jsonl"
        train_to_the_end(TrainingRun(build_part(case.plan, each, device), each, MemoryMeter(device), report))
        dist.barrier()
        records = [json.loads(line) for line in report.read_text().splitlines()]
        outcome.losses += [record["loss"] for record in records if "step" in record]
        outcome.norms += [record["grad_norm"] for record in records if "step" in record]
    return outcome


@pytest.mark.long
def test_the_built_in_loop_packs_documents_for_a_pipeline_and_resumes(tmp_path: Path) -> None:
    workload = Packed("", Layout()).workload.replace(seq_len=32, global_batch_size=6)

    def case(name: str, layout: Layout, *, saves: bool = False) -> Case:
        made = make_plan(tiny_model(num_blocks=2, vocab_size=256), layout, workload=workload)
        return Case(name, with_length_costs(made), run=train_on_files, saves=saves)

    expected = run_group(1, [case("one rank", Layout())], tmp_path)["one rank"][0]
    outcomes = run_group(2, [case("at once", Layout(pp=2)), case("in halves", Layout(pp=2), saves=True)], tmp_path)
    assert len(expected.losses) == 6
    for outcome in (*outcomes["at once"], *outcomes["in halves"]):
        assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert outcome.norms == pytest.approx(
            expected.norms, rel=10 * TOLERANCE
        )  # of gradients after Adam's first updates


@dataclass(frozen=True)
class Packed(Setup):
    model: str = "exchanging"
    workload: object = Setup("", Layout()).workload.replace(optimizer="sgd")
    num_steps: int = 2


ONE_RANK = (Packed("one rank", Layout()), Packed("one rank, full", Layout(recompute="full"), model="ring"))
TWO_RANKS = (
    Packed("two", Layout(dp_shard=2)),
    Packed("two of a ring, selective", Layout(dp_shard=2, recompute="selective"), model="ring"),
    Packed("two replicas", Layout(dp_replicate=2), model="ring"),
    Packed("learned positions", Layout(dp_shard=2, zero_stage=1), model="learned positions"),
    Packed("tp", Layout(tp=2)),
    Packed("experts", Layout(dp_shard=2, ep=2), model="routed"),
    Packed("pipeline, tied", Layout(pp=2)),
    Packed("pipeline, full", Layout(pp=2, recompute="full"), model="learned positions"),
    Packed("pipeline, chunks", Layout(pp=2, num_model_chunks=2, schedule="zb-h1"), model="four blocks"),
)
QUICK = ("two", "two of a ring, selective", "tp", "experts", "pipeline, tied")
FOUR_RANKS = (
    Packed("zero 3, ring and exchange", Layout(dp_shard=4)),
    Packed("zero 3, ring", Layout(dp_shard=4, recompute="full"), model="ring"),
    Packed("zero 2", Layout(dp_shard=4, zero_stage=2), model="ring"),
    Packed("zero 1", Layout(dp_shard=4, zero_stage=1)),
    Packed("zero 0", Layout(dp_replicate=4, zero_stage=0), model="ring"),
    Packed("hsdp", Layout(dp_replicate=2, dp_shard=2)),
    Packed("cp of the plan", Layout(dp_shard=2, cp=2)),
    Packed("zero 3 tp", Layout(dp_shard=2, tp=2)),
    Packed("pipelines, zero 1", Layout(pp=2, dp_shard=2, zero_stage=1)),
    Packed("pipelines, selective", Layout(pp=2, dp_shard=2, zero_stage=1, recompute="selective"), model="ring"),
    Packed("pipelines, replicas", Layout(pp=2, dp_replicate=2, zero_stage=0), model="ring"),
    Packed("pipeline, cp", Layout(pp=2, cp=2, recompute="full")),
    Packed("pipeline, tp", Layout(pp=2, tp=2)),
)  # fmt: skip


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    setups = {setup.model: setup for setup in (*ONE_RANK, *TWO_RANKS, *FOUR_RANKS)}
    cases = [Case(name, Packed(name, Layout(), model=name).plan, num_steps=2, run=one_by_one) for name in setups]
    return {name: ranks[0] for name, ranks in run_group(1, cases, tmp_path_factory.mktemp("references")).items()}


@pytest.mark.parametrize("setups", by_world_size(ONE_RANK, TWO_RANKS, FOUR_RANKS, quick=QUICK))
def test_documents_on_groups_train_as_one_after_the_other(
    setups: tuple[Packed, ...], references: dict[str, Outcome], tmp_path: Path
) -> None:
    cases = [Case(setup.name, setup.plan, num_steps=setup.num_steps, run=on_groups) for setup in setups]
    outcomes = run_group(setups[0].layout.world_size, cases, tmp_path)
    for setup in setups:
        require_alike(setup.name, outcomes[setup.name], references[setup.model])


def require_alike(name: str, outcomes: list[Outcome], expected: Outcome) -> None:
    is_tied = f"0 {TIED[0]}" not in expected.gradients
    seen = set()
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE), name
        for key, gradient in outcome.gradients.items():
            parameter = key.replace(*TIED) if is_tied else key  # the last stage has a copy of the embedding
            seen.add(parameter)
            largest = max(1.0, expected.gradients[parameter].abs().max().item())
            difference = (gradient - expected.gradients[parameter]).abs().max().item()
            assert difference <= TOLERANCE * largest, (name, parameter)
    assert seen == set(expected.gradients), name


FOREIGN = (
    ("llama", Layout(dp_shard=2)),
    ("qwen3", Layout(dp_shard=2, zero_stage=1, recompute="full")),
    ("qwen3", Layout(tp=2, sequence_parallel=False)),
    ("gpt2", Layout(dp_shard=2, zero_stage=2, recompute="selective")),
)


@pytest.mark.long
def test_models_of_transformers_train_on_documents_as_on_one_after_the_other(tmp_path: Path) -> None:
    workload = Packed("", Layout()).workload

    def case(name: str, layout: Layout) -> Case:
        plan = make_plan(spec_of(name), layout, workload=workload)
        return Case(f"{name} {layout}", plan, 2, module=name, run=on_groups)

    cases = [case(*pair) for pair in FOREIGN]
    references = {each.module: one_by_one(each, tmp_path) for each in cases}
    outcomes = run_group(2, cases, tmp_path)
    for each in cases:
        require_alike(each.name, outcomes[each.name], references[each.module])


def test_modules_that_documents_do_not_suit_are_refused_by_name() -> None:
    import transformers

    sizes = {"vocab_size": 98, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    window = transformers.MistralForCausalLM(
        transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=8)
    )
    both_ways = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    for module, why in (
        (build("plain"), "attention of PlainModel is its own code"),
        (window, "within a window of 8 tokens"),
        (both_ways, "blocks of BertForMaskedLM attend causally"),
    ):
        plan = make_plan(spec_of("plain"), Layout(), workload=Packed("", Layout()).workload)
        with pytest.raises(RuntimeMismatchError, match="cannot be trained on documents") as caught:
            require_user_documents(module, find_structure(module, None), plan)
        assert why in str(caught.value)
