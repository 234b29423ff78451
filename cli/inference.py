"""`meshwright plan --infer`: where weights, keys and values, and hidden states lie while text is generated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..schema import ClusterSpec

InferOption = Annotated[
    bool,
    typer.Option(
        "--infer", help="Plan generation instead of training: batch and places of weights and keys and values."
    ),
]
PromptOption = Annotated[
    int | None, typer.Option("--prompt-len", metavar="N", help="For --infer: tokens of each prompt.")
]
GenerateOption = Annotated[
    int | None, typer.Option("--generate-len", metavar="N", help="For --infer: tokens to generate after each prompt.")
]
BlockOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="N",
        min=1,
        help="For --infer: sequences of a block on each replica. Default: what generates most.",
    ),
]
LatencyOption = Annotated[
    float | None,
    typer.Option(
        "--latency-limit-s", metavar="S", min=0.0, help="For --infer: from the prompts to the last token of a block."
    ),
]
HostAttentionOption = Annotated[
    float | None,
    typer.Option(
        "--host-attention-gb-per-s",
        metavar="R",
        min=1e-3,
        help="For --infer: keys and values that a node's processors attend to in a second.",
    ),
]


def refuse_training_options(given: dict[str, Any]) -> None:
    """Options that mean nothing with --infer, by name; those that are neither None nor False were typed.

    Raises:
        ConfigError: there are some.
    """
    from ..schema import ConfigError

    typed = [name for name, value in given.items() if value is not None and value is not False]
    if typed:
        raise ConfigError(
            f"{', '.join(typed)} with --infer, which plans no training", help=f"leave out {' and '.join(typed)}"
        )


def refuse_inference_options(given: dict[str, Any]) -> None:
    """Options that need --infer, by name.

    Raises:
        ConfigError: there are some.
    """
    from ..schema import ConfigError

    typed = [name for name, value in given.items() if value is not None]
    if typed:
        raise ConfigError(f"{', '.join(typed)} without --infer", help="add --infer")


def require_training_sizes(global_batch_size: int | None, seq_len: int | None) -> tuple[int, int]:
    """Both.

    Raises:
        ConfigError: one is missing.
    """
    from ..schema import ConfigError

    if global_batch_size is None or seq_len is None:
        missing = "--global-batch-size" if global_batch_size is None else "--seq-len"
        raise ConfigError(f"Missing option '{missing}'", help="or plan generation: --infer --prompt-len N")
    return global_batch_size, seq_len


def plan_generation(
    model: str,
    cluster: str | ClusterSpec,
    *,
    lengths: tuple[int | None, int | None],
    precision: str | None,
    request: Any,
    top: int,
    out: Path,
    json: bool,
) -> None:
    """Plan, show and write.

    Raises:
        ConfigError: a length is missing, or what was typed does not mean anything.
        InfeasibleError: nothing fits or is quick enough.
    """
    from ..planner.inference import plan_inference
    from ..schema import ClusterSpec, ConfigError, ModelSpec
    from .inference_tables import inference_table
    from .progress import reading_cluster
    from .tables import show

    prompt_len, generate_len = lengths
    if prompt_len is None or generate_len is None:
        missing = "--prompt-len" if prompt_len is None else "--generate-len"
        raise ConfigError(f"--infer without {missing}", help=f"say how many tokens: {missing} N")
    spec = ModelSpec.resolve(model)
    if isinstance(cluster, str):
        with reading_cluster(cluster):
            machine = ClusterSpec.parse(cluster)
    else:
        machine = cluster
    generation = _generation(machine, prompt_len, generate_len, precision)
    found = plan_inference(spec, machine, generation, request, top=top)
    found.save(out)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        show(inference_table(found))
    typer.echo(f"wrote {out}; it is an estimate: meshwright runs no generation", err=True)


def _generation(machine: ClusterSpec, prompt_len: int, generate_len: int, precision: str | None) -> Any:
    from ..planner import default_precision
    from ..schema import ConfigError
    from ..schema.inference import Generation

    name = (precision or default_precision(machine)).removesuffix("-mixed")
    if name not in ("bf16", "fp16", "fp32"):
        raise ConfigError(
            f"--precision {precision}: generation is planned in bf16, fp16 or fp32", help="use --precision bf16"
        )
    return Generation(prompt_len=prompt_len, generate_len=generate_len, precision=name)
