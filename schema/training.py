"""What of a model is trained and how, as a user writes it: ``full``, ``lora:r=16,targets=qkv+out`` or ``zeroth-order``."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError
from .workload import LowRank

_NAMES = {"r": "rank", "rank": "rank", "targets": "targets", "frozen": "frozen", "dropout": "dropout"}


def parse_training(text: str) -> dict[str, Any]:
    """Fields of a Workload.

    Raises:
        ConfigError: none of the forms; an option is unknown, repeated or out of range.
    """
    how, colon, rest = text.partition(":")
    if how == "full" and not colon:
        return {}
    if how == "zeroth-order" and not colon:
        return {"passes": "zeroth_order"}
    if how == "lora":
        return {"adapters": _adapters(rest)}
    raise ConfigError(
        f"--train {text!r} is unknown",
        help="full, lora:r=16,targets=qkv+out, lora:r=64,frozen=nf4, zeroth-order",
    )


def _adapters(text: str) -> LowRank:
    fields: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in _NAMES:
            raise ConfigError(
                f"adapter option {item!r} is unknown", help="r=16, targets=qkv+out+mlp, frozen=nf4, dropout=false"
            )
        if _NAMES[name] in fields:
            raise ConfigError(f"adapter option {name!r} is given twice")
        fields[_NAMES[name]] = tuple(value.split("+")) if name == "targets" else value
    return LowRank(**fields)
