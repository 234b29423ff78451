"""Where the nodes of a job meet, from options or Slurm's variables: `apply`, and `doctor --nodes`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ..schema import TrainingPlan
from ..schema.errors import RuntimeMismatchError
from .options import OptionModel, option

if TYPE_CHECKING:
    from ..runtime.job.rendezvous import Rendezvous


class MeetingOptions(OptionModel):
    """The nodes of a job, and where they meet."""

    nnodes: int | None = option(
        None,
        "nodes of the job; run the same command on each, with the same secret in MESHWRIGHT_SECRET. Default: those of Slurm's "
        "step, else 1.",
    )
    node_rank: int | None = option(
        None, "position of this node in the plan's cluster, if it matters.", needs=("nnodes",)
    )
    rdzv_endpoint: str | None = option(None, "where the nodes meet.", metavar="HOST:PORT", needs=("nnodes",))
    rdzv_id: str | None = option(None, "name of the job at that place.", metavar="NAME", needs=("nnodes",))

    def rendezvous(self) -> Rendezvous:
        """Return where the nodes meet: as typed, as Slurm says, or nowhere because there is one node.

        Raises:
            ConfigError: several nodes without a place or a secret, or a node that is none of them.
        """
        from ..runtime.job.gate import secret_of
        from ..runtime.job.rendezvous import Rendezvous, slurm_rendezvous

        if self.nnodes is None and (slurm := slurm_rendezvous(os.environ)) is not None:
            return slurm
        place = Rendezvous(
            nnodes=1 if self.nnodes is None else self.nnodes,
            node_rank=self.node_rank,
            endpoint=self.rdzv_endpoint,
            run_id=self.rdzv_id,
        )
        return place if place.nnodes == 1 else replace(place, secret=secret_of(os.environ))


def meeting_of_used(plan: TrainingPlan, rendezvous: Rendezvous) -> Rendezvous | None:
    """Return where the nodes that a plan uses meet, of all that it was asked for; None on a node that it leaves idle.

    Raises:
        RuntimeMismatchError: a node does not know which one it is.
    """
    used = plan.cluster.num_nodes
    idle = {node for pool in plan.left_out for node in pool.nodes}
    described = used + len(idle) if idle else used if plan.requested is None else plan.requested.num_nodes
    if rendezvous.nnodes != described or described == used:
        return rendezvous
    if rendezvous.node_rank is None:
        raise RuntimeMismatchError(
            f"the plan uses {used} of {rendezvous.nnodes} nodes, so each must know which one it is",
            help=f"add --node-rank, or run on {used} nodes only",
        )
    nodes = [node for node in range(described) if node not in idle][:used]
    if rendezvous.node_rank not in nodes:
        return None
    return replace(rendezvous, nnodes=used, node_rank=nodes.index(rendezvous.node_rank))
