"""The `base_model_tp_plan` of models of transformers as a placement in our program, against the one that the program chooses.

    python benchmarks/placements_against_tp_plan.py OUT.json [architecture ...] [--tp 4] [--cluster 8xH100-SXM-80GB] [--samples 128]
        [--narrower 8]

Of each architecture one layer with its default heads, and with its default widths divided by ``--narrower``, is made on the meta
device and its units are traced, tried and proved; the gate computes with all of its parameters, so wide ones take minutes and
gigabytes. The program is then solved twice with the same costs: freely, and with the weights of the model's plan in the form that
the plan says, read in that form, and everything else that has parameters whole. What has no parameters is free in both, so the
plan is read as kindly as it can be. Ours can then never cost more than theirs but by the solver's tolerance: a row where it does
is an error of the program, and the figure to look at is how much less it costs. Counted are units with a weight of the plan;
seconds are those of a forward and backward pass of so many samples of SEQ_LEN tokens, with what is kept of the states of
parameters (planner/placements.py).
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from meshwright.cost_models.coefficients import Scenario
from meshwright.planner.placements import Placing
from meshwright.profilers.module.split_rules import Rule, transformers_rules
from meshwright.profilers.placements.work import placed_units
from meshwright.schema import ClusterSpec, MeshwrightError, Workload
from meshwright.schema.placements import UnitPlacement, UnitWork
from transformers import AutoConfig, AutoModel

ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "cohere", "cohere2", "olmo", "olmo2",
    "olmo3", "granite", "glm", "glm4", "starcoder2", "gpt_neox", "smollm3", "helium", "nemotron", "seed_oss", "ministral",
)  # fmt: skip
SEQ_LEN = 32
VOCAB_SIZE = 256
"""Embeddings are no part of the plans."""

WIDTHS = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 8}
"""Of a config, with what they stay multiples of."""

FORMS: dict[Rule, str] = {"by_output": "S0", "gathered": "S0", "by_input": "S1", "by_slice": "S1"}
"""Of a weight [outputs, inputs]."""


def with_samples(work: UnitWork, num_samples: int) -> UnitWork:
    """Return the work of more samples; operators on none of them (tables of angles) are small and grow with the others."""
    factor = num_samples / work.num_samples
    operators = [
        op if op.op in ("parameter", "given")
        else op.replace(elements=tuple(math.ceil(n * factor) for n in op.elements), flops=round(op.flops * factor))
        for op in work.operators
    ]  # fmt: skip
    return work.replace(operators=tuple(operators), num_samples=num_samples)


def as_planned(work: UnitWork, rules: Mapping[str, Rule]) -> UnitWork | None:
    """Return the work with the forms of a model's plan only; None where no weight of the plan is in it."""
    unit = work.paths[0]
    forms = dict[str, str]()  # by node
    for node, path in work.parameters:
        owner, _, name = f"{unit}.{path}".rpartition(".")
        rule = rules.get(owner)
        form = FORMS.get(rule, "I") if rule is not None else "I"
        forms[node] = form if name == "weight" or form == "S0" else "I"
    if all(form == "I" for form in forms.values()):
        return None

    def allowed(written: str, position: int, form: str) -> bool:
        read = written.partition(";")[0].partition(">")[0].split(",")[position]
        return read == form if form != "I" else read in ("I", "R")

    operators = []
    for op in work.operators:
        signatures = op.signatures
        if op.name in forms:
            signatures = (f">{forms[op.name]}",)
        for position, (node, _) in enumerate(op.ins):
            # The bias of a product cut by its input is a summand, so any form of it is the plan's.
            if node in forms and not (forms[node] == "I" and any(forms.get(n) == "S1" for n, _ in op.ins)):
                signatures = tuple(s for s in signatures if allowed(s, position, forms[node]))
        operators.append(op.replace(signatures=signatures))
    if missing := [op.name for op in operators if not op.signatures]:
        raise MeshwrightError(f"no proved signature of {missing[0]} reads its weight as the plan cuts it")
    return work.replace(operators=tuple(operators))


def compared(name: str, scenario: Scenario, tp: int, num_samples: int, narrower: int) -> dict[str, Any]:
    """Return both costs of one layer of an architecture, and whether the same weights are cut."""
    fixed = {"num_hidden_layers": 1, "vocab_size": VOCAB_SIZE, "pad_token_id": 0, "use_cache": False}
    full = AutoConfig.for_model(name, **fixed)
    given = {size: getattr(full, size, None) for size in WIDTHS}
    given["head_dim"] = given["head_dim"] or full.hidden_size // full.num_attention_heads
    sizes = {size: width // narrower // WIDTHS[size] * WIDTHS[size] for size, width in given.items() if width}
    config = AutoConfig.for_model(name, **fixed, **sizes)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    works, unplaced = placed_units(model, {"input_ids": torch.zeros(1, SEQ_LEN, dtype=torch.long)}, (tp,))
    rules = transformers_rules(model)
    ours = theirs = 0.0
    cut: tuple[set[tuple[str, str]], set[tuple[str, str]]] = (set(), set())
    for work in works:
        if work.in_evaluation or (planned := as_planned(with_samples(work, num_samples), rules)) is None:
            continue
        placements = [
            Placing(with_samples(work, num_samples), scenario, {}).place(),
            Placing(planned, scenario, {}).place(),
        ]
        ours, theirs = ours + placements[0].objective_s, theirs + placements[1].objective_s
        for of, placement in zip(cut, placements, strict=True):
            of |= cut_matrices(placement, work)
    if not theirs:
        return {"whole": [unit.why for unit in unplaced]}
    row = {
        "widths": [config.hidden_size, config.intermediate_size],
        "ours_us": round(1e6 * ours, 1),
        "theirs_us": round(1e6 * theirs, 1),
        "theirs_over_ours": round(theirs / ours, 4),
    }
    return row | {
        "same products cut": cut[0] == cut[1],
        "only ours": sorted(cut[0] - cut[1]),
        "only theirs": sorted(cut[1] - cut[0]),
    }


def cut_matrices(placement: UnitPlacement, work: UnitWork) -> set[tuple[str, str]]:
    """Return the matrices that products read in parts, each with its form; one that is gathered before is none."""
    sizes = {op.name: op.elements[0] for op in work.operators}
    paths = {node: path for node, path in work.parameters if sizes[node] > 1 << 16}
    operators = [op for op in work.operators if op.op not in ("parameter", "given")]
    return {
        (paths[node], form)
        for op, written in zip(operators, placement.signatures, strict=True)
        for (node, _), form in zip(op.ins, written.partition(">")[0].split(","), strict=True)
        if node in paths and form[0] == "S"
    }


def main() -> None:
    """Compare and write the table."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("names", nargs="*", help="all where none is given; rows of others in OUT.json stay")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--cluster", default="8xH100-SXM-80GB")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--narrower", type=int, default=8, help="divide widths by it; heads stay as many")
    given = parser.parse_args()
    workload = Workload(seq_len=SEQ_LEN, global_batch_size=given.samples)
    scenario = Scenario.build(workload, ClusterSpec.parse(given.cluster))
    rows = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.names or ARCHITECTURES:
        try:
            rows[name] = compared(name, scenario, given.tp, given.samples, given.narrower)
        except Exception as error:  # whatever a model meets; a row of the table
            rows[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(name, json.dumps(rows[name]), flush=True)
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
