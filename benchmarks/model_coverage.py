"""Every causal language model of the installed transformers in its default configuration: known, traced or refused and why.

    python benchmarks/model_coverage.py OUT.json [model_type ...]

One line each: known (a family of schema/catalogue/families.toml); traced, with seconds, parameters, whether the module has as many,
and what the model cannot be cut by; refused, with the message. The last line counts them.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.profilers.module.configs import build_model, default_model_types, trace_model
from meshwright.schema import ConfigError, ModelSpec


class Outcome(NamedTuple):
    """What became of one model_type."""

    model_type: str
    outcome: str
    seconds: float = 0.0
    parameters: int = 0
    is_exact: bool = True
    remark: str = ""


def try_type(model_type: str, seq_len: int) -> Outcome:
    """Read or trace the default configuration of a model_type."""
    from transformers import CONFIG_MAPPING

    start = time.perf_counter()

    def outcome(kind: str, **others: Any) -> Outcome:
        return Outcome(model_type, kind, round(time.perf_counter() - start, 1), **others)

    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception as error:  # some have no defaults
        return outcome("no default", remark=str(error).strip().splitlines()[0])
    content = config.to_dict()
    try:
        return outcome("known", parameters=ModelSpec.from_hf(_as_published(content)).num_params)
    except ConfigError:
        pass
    try:
        model = build_model(content, where=model_type)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
        length = min(seq_len, longest) if longest > 0 else seq_len
        spec = trace_model(model, seq_len=length, name=model_type)
    except ConfigError as error:
        return outcome("refused", remark=error.message)
    assert spec.code is not None
    remark = "; ".join(filter(None, (spec.code.not_staged, spec.code.not_sharded)))
    exact = spec.num_params == sum(parameter.numel() for parameter in model.parameters())
    return outcome("traced", parameters=spec.num_params, is_exact=exact, remark=remark)


def _as_published(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as a file would hold it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[content["model_type"]]
    plain = json.loads(json.dumps(content, default=str))
    return {**plain, "architectures": [name if isinstance(name, str) else name[0]]}


def main() -> None:
    """Write and print the table."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT.json")
    parser.add_argument("model_types", nargs="*", help="all of them where none is given")
    parser.add_argument("--seq-len", type=int, default=1024)
    given = parser.parse_args()
    outcomes = []
    for model_type in given.model_types or default_model_types():
        outcomes.append(try_type(model_type, given.seq_len))
        print(*outcomes[-1], flush=True)
        Path(given.out).write_text(json.dumps([found._asdict() for found in outcomes], indent=1) + "\n")
    print(dict(Counter(found.outcome for found in outcomes)))


if __name__ == "__main__":
    main()
