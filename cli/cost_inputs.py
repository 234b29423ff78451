"""What `plan --objective cost` reads besides model and workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..schema import ClusterSpec, Offer

_PREFERENCE = ("bf16-mixed", "fp16-mixed", "fp32")


def read_offers(cluster: str | None, offers: Path | None, *, calibrate: Path | None) -> tuple[Offer, ...]:
    """The offers of a file; none where a cluster is given instead.

    Raises:
        ConfigError: neither or both are given, or the file does not hold offers with prices.
    """
    from ..schema import ConfigError
    from ..schema.offers import offers_from_file

    if (cluster is None) == (offers is None):
        given = "neither is" if cluster is None else "both are"
        raise ConfigError(
            f"a plan needs --cluster, or --objective cost with --offers: {given} given",
            help="for one kind of machine: --cluster 64xH100-SXM-80GB",
        )
    if offers is None:
        return ()
    if calibrate is not None:
        raise ConfigError("--calibrate corrects one cluster, not offers of several", help="use --cluster")
    return offers_from_file(str(offers))


def common_cluster(offers: Sequence[Offer]) -> ClusterSpec:
    """The cluster that decides the precision: the first one whose best precision is the least of all, so that all have it."""
    from ..planner import default_precision

    return max((offer.cluster for offer in offers), key=lambda cluster: _PREFERENCE.index(default_precision(cluster)))


def require_cost(**options: object) -> None:
    """Options that only mean something for --objective cost.

    Raises:
        ConfigError: one of them is given.
    """
    from ..schema import ConfigError

    for name, value in options.items():
        if value:
            raise ConfigError(f"--{name.replace('_', '-')} is for --objective cost", help="add --objective cost")
