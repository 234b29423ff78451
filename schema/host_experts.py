"""Experts in the host's memory under serving: which part of each layer's, and who computes those that a step reaches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Frozen, reason_of
from .errors import ConfigError
from .units import format_percent

HostSplit = Literal["balance", "copy", "compute"]
"""What becomes of experts that are reached and not on the devices: part of them is copied up and the rest computed by the host's
processors, as is best in each step (HybriMoE, arXiv:2504.05897); all are copied (MoE-Lens, arXiv:2504.09345; ExpertFlow,
arXiv:2410.17954; SGLang's paged experts); all are computed there (KTransformers)."""

_EXAMPLE = "--experts-on-host on, or 0.75[,by=balance|copy|compute][,predicted=0.9]"


class ExpertsOnHost(Frozen):
    """Routed experts that lie in the host's memory, the least visited of each layer; the others are on the devices.

    Attributes:
        share: of each layer's experts; None: as is best, none among it.
        by: who computes those that a step reaches.
        predicted: share of the copies that are foreseen, and so begin beside the layer before; the others wait for the router.
    """

    share: Annotated[float, Field(gt=0, le=1)] | None = None
    by: HostSplit = "balance"
    predicted: Annotated[float, Field(ge=0, le=1)] = 0.0


def experts_title(placed: ExpertsOnHost | None) -> str:
    """Return how many experts lie with the host, to stand behind a layout; "" where none do."""
    if placed is None or placed.share is None:
        return ""
    return f" with {format_percent(placed.share, 0 if placed.share in (0.25, 0.5, 0.75, 1) else 1)} of the experts on the host"


def parse_experts_on_host(text: str) -> ExpertsOnHost | None:
    """Read ``on``, ``off`` or a share, with ``by=`` and ``predicted=``.

    Raises:
        ConfigError: a key that is not known, or no share.
    """
    first, *more = [part.strip() for part in text.split(",")]
    if first == "off" and not more:
        return None
    fields = {key: value for key, _, value in (part.partition("=") for part in more)}
    if len(fields) != len(more) or not {*fields} <= {"by", "predicted"}:
        raise ConfigError(f"--experts-on-host {text!r}: a share of each layer's experts, or on", help=_EXAMPLE)
    try:
        given: dict[str, Any] = {} if first == "on" else {"share": float(first)}
        given |= {"by": fields["by"]} if "by" in fields else {}
        given |= {"predicted": float(fields["predicted"])} if "predicted" in fields else {}
        return ExpertsOnHost(**given)
    except (ValueError, ConfigError) as error:
        reason = reason_of(error, ExpertsOnHost)
        raise ConfigError(f"--experts-on-host {text!r}: {reason}", help=_EXAMPLE) from error
