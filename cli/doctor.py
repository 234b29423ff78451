"""`meshwright doctor`: what is installed and what will not work here; with `--nodes`, which ranks are slower than their peers."""

from __future__ import annotations

from typing import Annotated

import typer

from ..schema import ConfigError
from .meeting import MeetingOptions
from .options import JsonOption, command
from .terminal import headed_table, show, show_answer

_SIGNS = {"ok": "[green]ok[/]", "limited": "[yellow]limited[/]", "broken": "[red]broken[/]"}


@command()
def doctor(
    meeting: MeetingOptions,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Compare the ranks of this node, or of several (--nnodes), instead.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of --nodes: on each node. Default: its GPUs, or cores.", min=1, max=1024),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Look at this installation and machine: packages, solvers, devices, backends, links, and what will not work and why.

    With --nodes, for ten seconds: which ranks multiply, read memory or exchange slower than their peers, by 5 % and three median
    absolute deviations (as `apply --preflight`). Exit code 1 where something is broken or slow; what is merely limited is 0.
    """
    from ..profilers.doctor import examine
    from .markup import plain

    if nodes:
        _compare_nodes(meeting, ranks, as_json=json)
        return
    if ranks is not None or meeting.nnodes is not None:
        raise ConfigError("--ranks and --nnodes are for a comparison of ranks", help="add --nodes")
    findings = examine()
    if json:
        typer.echo("[" + ",\n".join(finding.model_dump_json() for finding in findings) + "]")
    else:
        table = headed_table("", "part", "state", "found", "means", text=("part", "state", "found", "means"))
        for finding in findings:
            means = finding.means + (f"; {finding.help}" if finding.help and finding.status != "ok" else "")
            table.add_row(finding.subject, _SIGNS[finding.status], plain(finding.found), plain(means))
        show(table)
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)


def _compare_nodes(meeting: MeetingOptions, ranks: int | None, *, as_json: bool) -> None:
    from ..profilers.machine import identify
    from ..runtime.job import preflight
    from ..runtime.job.rendezvous import meet
    from .markup import plain

    place, machine = meeting.rendezvous(), identify(ranks)
    size = machine.num_devices
    groups = [range(node * size, (node + 1) * size) for node in range(place.nnodes)]
    with meet(place) as met:
        report = preflight.compare_nodes(met, groups, machine.backend, seconds=preflight.PREFLIGHT_S)
    columns = ("rank", "node", "device", "multiplies", "reads memory", "exchanges", "")
    title = f"times over those of the peers, medians of {report.repetitions} repetitions"
    table = headed_table(title, *columns, text=("node", "device", ""))
    for rank in report.ranks:
        ratios = (rank.compute_ratio, rank.memory_ratio, rank.link_ratio)
        state = "slow" if rank.rank in report.slow_ranks else ""
        host = plain(f"{rank.node} ({report.hosts[rank.node]})")
        table.add_row(str(rank.rank), host, plain(rank.device), *(f"{ratio:.2f}" for ratio in ratios), state)
    show_answer(report, table, as_json=as_json)
    for line in report.sentences():
        typer.echo(line, err=True)
    if report.slow:
        raise typer.Exit(1)
