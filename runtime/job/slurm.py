"""Where the nodes of a job under Slurm meet, from what `srun` tells each of its tasks.

`meshwright apply` starts the ranks of a node itself, so `srun` starts one task on each node:

    srun --ntasks-per-node=1 meshwright apply plan.json

Source: man srun, "Output environment variables" (Slurm 20.02 and later have these names).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...schema import ConfigError
from ...schema.base import shown
from .launch import Rendezvous

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Below what Linux gives to outgoing connections (net.ipv4.ip_local_port_range); two jobs on a node have different numbers."""

_GIVE_PLACE = "say where the nodes meet: --nnodes N --node-rank I --rdzv-endpoint HOST:PORT"


def slurm_rendezvous(variables: Mapping[str, str]) -> Rendezvous | None:
    """The meeting place of the nodes of a step; None outside `srun` and on one node.

    Args:
        variables: the environment.

    Raises:
        ConfigError: the step has several tasks on a node, or a variable of it is missing or no number.
    """
    if "SLURM_STEP_NUM_NODES" not in variables or "SLURM_STEP_ID" not in variables:
        return None
    num_nodes, num_tasks = (_number(variables, f"SLURM_STEP_NUM_{what}") for what in ("NODES", "TASKS"))
    if num_tasks != num_nodes:
        raise ConfigError(
            f"srun started {num_tasks} tasks on {num_nodes} nodes; `meshwright apply` starts the ranks of a node itself",
            help="srun --ntasks-per-node=1 meshwright apply ...",
        )
    if num_nodes == 1:
        return None
    job = _number(variables, "SLURM_JOB_ID")
    host = first_host(variables.get("SLURM_STEP_NODELIST", ""))
    if not host:
        raise ConfigError("SLURM_STEP_NODELIST names no node", help=_GIVE_PLACE)
    return Rendezvous(
        nnodes=num_nodes,
        node_rank=_number(variables, "SLURM_NODEID"),
        endpoint=f"{host}:{_FIRST_PORT + job % _NUM_PORTS}",
        run_id=f"{job}.{variables['SLURM_STEP_ID']}",
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ConfigError(f"{name} = {shown(text)} in a step of Slurm's: must be a whole number", help=_GIVE_PLACE)
    return int(text)


def first_host(nodes: str) -> str:
    """The first of the names that a list of Slurm's stands for: ``gpu[003-007,12],login`` begins with gpu003."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
