"""The picture of a scheduled batch, as SVG: ranks against seconds, a bar for each group, a colour for each size of group."""

from __future__ import annotations

from collections.abc import Iterator

from ...schema.units import format_seconds
from ...solvers.batch_groups import BatchProblem, BatchSchedule

_COLOURS = (
    "#4c78a8",
    "#54a24b",
    "#eeca3b",
    "#f58518",
    "#e45756",
    "#b279a2",
    "#72b7b2",
    "#9d755d",
    "#ff9da6",
    "#79706e",
    "#bab0ac",
)
_WIDTH, _HEIGHT, _EDGE, _TOP, _BOTTOM = 960, 480, 64, 28, 56


def batch_picture(name: str, instance: BatchProblem, schedule: BatchSchedule) -> str:
    """Return the picture; where ranks wait for each other, a micro-batch begins when the slowest group of the one before ends."""
    from html import escape

    right, floor = _WIDTH - 16, _HEIGHT - _BOTTOM
    per_s = (right - _EDGE) / max(schedule.seconds, 1e-12)
    per_rank = (floor - _TOP) / instance.num_ranks
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_EDGE}" y="18">{escape(name or "batch")}: {len(instance.lengths):,} sequences on {instance.num_ranks:,} ranks, '
        f"{format_seconds(schedule.seconds)}, bound {format_seconds(schedule.bound_seconds)}</text>",
        f'<rect x="{_EDGE}" y="{_TOP}" width="{right - _EDGE}" height="{floor - _TOP}" fill="#eeeeee"/>',
    ]
    for start_s, end_s, first, size, tokens in _bars(instance, schedule):
        parts.append(
            f'<rect x="{_EDGE + start_s * per_s:.2f}" y="{_TOP + first * per_rank:.2f}" width="{(end_s - start_s) * per_s:.2f}" '
            f'height="{size * per_rank:.2f}" fill="{_COLOURS[(size.bit_length() - 1) % len(_COLOURS)]}" stroke="white" '
            f'stroke-width="0.5"><title>{_ranks(first, size)}: {tokens:,} tokens, {format_seconds(end_s - start_s)}'
            "</title></rect>"
        )
    parts += [
        f'<text x="8" y="{_TOP + 10}">rank 0</text>',
        f'<text x="8" y="{floor}">{instance.num_ranks - 1}</text>',
        f'<text x="{_EDGE}" y="{floor + 16}">0 s</text>',
        f'<text x="{right}" y="{floor + 16}" text-anchor="end">{format_seconds(schedule.seconds)}</text>',
    ]
    sizes = sorted({group.size for groups in schedule.micro_batches for group in groups})
    for place, size in enumerate(sizes):
        x = _EDGE + 84 * place
        colour = _COLOURS[(size.bit_length() - 1) % len(_COLOURS)]
        parts.append(f'<rect x="{x}" y="{floor + 30}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{floor + 40}">{size} rank{"s" if size > 1 else ""}</text>')
    idle = "grey: ranks wait, and every micro-batch's gathers" if instance.waits else "grey: ranks wait, and gathers"
    parts.append(f'<text x="{right}" y="{floor + 40}" text-anchor="end">{idle}</text>')
    return "\n".join((*parts, "</svg>", ""))


def _ranks(first: int, size: int) -> str:
    return f"ranks {first} to {first + size - 1}" if size > 1 else f"rank {first}"


def _bars(instance: BatchProblem, schedule: BatchSchedule) -> Iterator[tuple[float, float, int, int, int]]:
    """Yield start and end of each group, its first rank, its size and its tokens."""
    ready = [0.0] * instance.num_ranks
    for groups in schedule.micro_batches:
        ends = list(ready)
        for group in groups:
            ranks = range(group.first, group.first + group.size)
            start_s = max(ready[rank] for rank in ranks)
            end_s = start_s + group.seconds
            for rank in ranks:
                ends[rank] = end_s + instance.fixed_s
            yield start_s, end_s, group.first, group.size, int(instance.lengths[list(group.sequences)].sum())
        ready = [max(ends)] * instance.num_ranks if instance.waits else ends
