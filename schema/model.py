"""ModelSpec: a decoder-only transformer as an ordered run-length list of layers.

Its layers are in layers.py. A published ``config.json`` is read by hf.py. Parameter counts are exact;
they are compared with the real models in tests/unit/schema/test_catalogue_models.py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from .base import Count, Frozen, PositiveFloat, did_you_mean, read_json, shown
from .catalogue import load_model, model_names
from .errors import ConfigError
from .hf import fields_from_hf
from .layers import Block, Embedding, Head, LayerRun, MTPHead
from .limits import MAX_MODEL_LAYERS
from .rope import Rope
from .traced import CodeFacts


def _no_option(name: str) -> str:
    if name.startswith("-"):
        raise ValueError("it must not begin with -, which the commands of engines take for an option")
    return name


class ModelSpec(Frozen):
    """A decoder-only model: embedding, blocks, head, in order.

    Attributes:
        architecture: the class name in the published config, e.g. ``LlamaForCausalLM``.
        max_seq_len: longest sequence the published config allows.
        also: what its code does beside its layers, with no parameters and at no cost worth counting (multipliers, norms after
            parts instead of before them): our runtime and Megatron's exporter do not.
        source: where the numbers are from.
        code: of a model traced from somebody else's code what `parallelize` can do with it.
    """

    name: Annotated[str, Field(min_length=1), AfterValidator(_no_option)]
    architecture: str
    hidden_dim: Count
    layers: tuple[LayerRun, ...] = Field(min_length=3)
    tie_embeddings: bool
    max_seq_len: Count
    norm_eps: PositiveFloat = 1e-5
    rope: Rope | None = None
    also: tuple[str, ...] = ()
    source: str = ""
    code: CodeFacts | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        kinds = [run.layer.kind for run in self.layers]
        first, head = self.layers[0], next((run.layer for run in self.layers if isinstance(run.layer, Head)), None)
        if kinds[0] != "embedding" or first.count != 1:
            raise ValueError("the first layer must be one embedding")
        if head is None or [kind for kind in kinds if kind not in ("block", "mtp")] != ["embedding", "head"]:
            raise ValueError("layers must be: embedding, blocks, head, then MTP heads if any")
        if not all(kind == "block" for kind in kinds[1 : kinds.index("head")]) or len(kinds) < 3:
            raise ValueError("only blocks may stand between the embedding and the head")
        if not all(kind == "mtp" for kind in kinds[kinds.index("head") + 1 :]):
            raise ValueError("only MTP heads may follow the head")
        if self.num_layers > MAX_MODEL_LAYERS:
            raise ValueError(f"it has {self.num_layers} layers, at most {MAX_MODEL_LAYERS} are planned for")
        if head.tied != self.tie_embeddings:
            raise ValueError(f"tie_embeddings is {self.tie_embeddings} but the head says tied={head.tied}")
        return self

    @property
    def embedding(self) -> Embedding:
        """The first layer."""
        layer = self.layers[0].layer
        assert isinstance(layer, Embedding)
        return layer

    @property
    def head(self) -> Head:
        """Final norm and output projection."""
        return next(run.layer for run in self.layers if isinstance(run.layer, Head))

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, V."""
        return self.embedding.vocab_size

    def iter_layers(self) -> Iterator[Embedding | Block | Head | MTPHead]:
        """Yield every layer in order, runs expanded."""
        for run in self.layers:
            for _ in range(run.count):
                yield run.layer

    @property
    def traced_len(self) -> int | None:
        """Tokens of the sequences that a traced model was counted for; None for a model of known layers."""
        return next((run.layer.counted.seq_len for run in self.layers if run.layer.counted), None)

    @property
    def num_layers(self) -> int:
        """All layers: embedding, blocks, head, MTP heads."""
        return sum(run.count for run in self.layers)

    @property
    def num_blocks(self) -> int:
        """Decoder layers only."""
        return sum(run.count for run in self.layers if isinstance(run.layer, Block))

    @property
    def block_runs(self) -> tuple[tuple[Block, int], ...]:
        """The blocks as (block, count), in order."""
        return tuple((run.layer, run.count) for run in self.layers if isinstance(run.layer, Block))

    @property
    def in_halves(self) -> Self | None:
        """The model with a layer for each part of its blocks (`Block.halves`); None where a block cannot be cut."""
        if not all(block.halves for block, _ in self.block_runs):
            return None
        runs: list[LayerRun] = []
        for run in self.layers:
            parts = run.layer.halves if isinstance(run.layer, Block) else ()
            runs += [LayerRun(layer=part) for part in parts * run.count] or [run]
        return self.replace(layers=tuple(runs))

    def staged(self, *, half_blocks: bool) -> Self:
        """Return the model whose layers stages are made of: itself, or with half blocks its halves.

        Raises:
            ConfigError: its blocks cannot be cut.
        """
        if not half_blocks or all(block.num_parts == 1 for block, _ in self.block_runs):
            return self
        if (halved := self.in_halves) is None:
            raise ConfigError(f"half_blocks: the parts of a block of {self.name} share a norm or an input")
        return halved

    @property
    def is_moe(self) -> bool:
        """True if any block routes tokens to experts."""
        return any(run.layer.experts for run in self.layers)

    @cached_property
    def content(self) -> str:
        """Return a hash of everything but the name."""
        return hashlib.sha256(self.model_dump_json(exclude={"name"}).encode()).hexdigest()[:16]

    @property
    def num_params(self) -> int:
        """Parameters; a tied output projection counts once."""
        return sum(run.count * run.layer.num_params(self.hidden_dim) for run in self.layers)

    @property
    def num_active_params(self) -> int:
        """Parameters one token goes through (all of them for a dense model)."""
        return sum(run.count * run.layer.num_active_params(self.hidden_dim) for run in self.layers)

    @classmethod
    def from_hf(cls, config: str | Path | Mapping[str, Any], *, name: str | None = None) -> Self:
        """Read a Hugging Face ``config.json`` (a path, a folder that holds one, or its parsed content).

        The name is the given one, ``_name_or_path`` of the file, the folder's name, or the architecture.

        Raises:
            ConfigError: the file cannot be read, lacks a field, or is of an architecture that is not supported.
        """
        path = None if isinstance(config, Mapping) else _config_path(Path(config))
        content: Any = config if path is None else read_json(path)
        architecture, fields = fields_from_hf(content, "config" if path is None else str(path))
        stored = content.get("_name_or_path")
        if isinstance(stored, str) and stored:
            name = name or stored
        elif path is not None:
            name = name or (path.absolute().parent.name if path.name == "config.json" else path.stem)
        return cls(name=name or architecture, architecture=architecture, **fields)

    @classmethod
    def named(cls, name: str) -> Self:
        """Load a model of the catalogue, e.g. ``llama-3.1-8b``.

        Raises:
            ConfigError: there is no such name; the message offers the nearest ones.
        """
        entry = load_model(name)
        return cls.from_hf(entry["config"], name=entry["name"]).replace(source=entry["source"])

    @classmethod
    def resolve(cls, text: str) -> Self:
        """Read what a user types for MODEL: a catalogue name, a ``config.json``, a folder that holds one, or a saved ModelSpec.

        Raises:
            ConfigError: there is no such name or file, or it is no model (for a name of the Hub the help says what to do).
        """
        # os.path.exists, because Path.exists raises for names that no file can have (too long, NUL).
        exists = os.path.exists(text)  # noqa: PTH110
        if "/" in text and not exists and not text.endswith(".json"):
            known = did_you_mean(text.rstrip("/").rpartition("/")[2], model_names())
            local = "nothing is downloaded: give the path of the model's config.json, or a name of `meshwright models`"
            raise ConfigError(
                f"cannot read {shown(text)}: there is no such file or folder", help=f"{known} {local}".strip()
            )
        if exists or text.endswith(".json"):
            data = read_json(text) if text.endswith(".json") else None
            if isinstance(data, dict) and {"layers", "architecture", "hidden_dim"} <= data.keys():
                return cls(**data)  # what `profilers.profile_module` made of a model outside the catalogue
            return cls.from_hf(text)
        return cls.named(text)


def _config_path(path: Path) -> Path:
    try:
        if path.is_dir() and not (path / "config.json").exists():
            raise ConfigError(f"cannot read {shown(str(path / 'config.json'))}: the folder holds no config.json")
        return path / "config.json" if path.is_dir() else path
    except OSError as error:  # a name longer than the file system allows
        raise ConfigError(f"cannot read {shown(str(path))}: {error.strerror}") from None
