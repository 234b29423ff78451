"""Rope: how a model turns its queries and keys, and as a published config.json states it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictBool

from .base import Count, Frozen, PositiveFloat

Size = Annotated[int, Field(strict=True, ge=1, le=10**9)]
Positive = Annotated[float, Field(strict=True, gt=0, lt=1e300)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]


class Rope(Frozen):
    """Rotary position embedding; ``scaling`` names the rule of the published config, with its numbers.

    Attributes:
        beta_fast, beta_slow: yarn: turns within the original length above which a pair keeps its speed, and below which it is
            slowed by the factor.
        attention_factor: yarn: factor on both tables; unset, it follows from factor, mscale and mscale_all_dim.
        truncate: yarn: the bounds of the blend are rounded to integer numbers of pairs.
    """

    theta: PositiveFloat = 10000.0
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    factor: PositiveFloat = 1.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_len: Count | None = None
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    truncate: bool = True


class RopeSettings(BaseModel):
    """The object ``rope_parameters`` (transformers 5) or ``rope_scaling`` (before)."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "su"] = Field(
        default="default", validation_alias=AliasChoices("rope_type", "type")
    )
    rope_theta: Positive | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: Fraction | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    attention_factor: Positive | None = None
    truncate: StrictBool = True
