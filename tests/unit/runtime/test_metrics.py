import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from meshwright.runtime.training.metrics import MetricsWriter, RankRecord, read_new_records, summarise
from meshwright.runtime.training.step_clock import STEP_PARTS
from meshwright.schema import ConfigError, Layout
from small_jobs import small_plan


def peaks(*sizes: int, forward_s: Sequence[Sequence[float]] = ()) -> list[RankRecord]:
    none = dict.fromkeys(STEP_PARTS, 0.0)
    return [
        RankRecord(
            rank=rank,
            peak_allocated_bytes=size,
            peak_reserved_bytes=size + 1,
            parts_s=[{**none, "forward": s, "optimizer": 0.1} for s in (forward_s[rank] if forward_s else ())],
        )
        for rank, size in enumerate(sizes)
    ]


def test_summary_leaves_out_warm_up_and_takes_the_fullest_rank() -> None:
    result = summarise(small_plan(), [9.0, 8.0, 0.2, 0.4, 0.3], peaks(12, 18), memory_source="cuda-allocator")
    assert result["measured"]["step_time_s"] == 0.3
    assert result["measured"]["warmup_steps"] == 2
    assert result["measured"]["peak_allocated_bytes"] == 18
    assert result["ratio"]["peak_allocated_bytes"] == 18 / result["predicted"]["peak_allocated_bytes"]
    assert result["ratio"]["step_time_s"] == 0.3 / result["predicted"]["step_time_s"]


def test_summary_of_a_short_run_counts_every_step() -> None:
    measured = summarise(small_plan(), [1.0, 3.0], peaks(1), memory_source="resident-growth")["measured"]
    assert (measured["step_time_s"], measured["warmup_steps"]) == (2.0, 0)


def test_summary_has_parts_of_the_busiest_rank_and_names_the_slow_one() -> None:
    steps = [1.0 + 0.01 * (i % 3) for i in range(12)]
    ranks = peaks(1, 1, forward_s=(steps, [1.5 * s for s in steps]))
    plan = small_plan(Layout(dp_replicate=2))
    result = summarise(plan, [2.0] * 12, ranks, memory_source="resident-growth")
    assert result["measured"]["parts_s"]["compute"] == pytest.approx(1.5 * 1.01, rel=0.02)
    assert sum(result["predicted"]["parts_s"].values()) == pytest.approx(plan.estimate.step_time_s)
    (slow,) = result["measured"]["stragglers"]
    assert slow["rank"] == 1
    assert slow["slower_fraction"] == pytest.approx(1.6 / 1.1 - 1, rel=0.05)
    assert [rank["parts_s"]["optimizer"] for rank in result["measured"]["ranks"]] == [0.1, 0.1]


def test_follower_sees_every_line_as_it_is_written(tmp_path: Path) -> None:
    path, finished = tmp_path / "report.jsonl", threading.Event()
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(lambda: list(read_new_records(path, finished, poll_s=0.001)))
        writer = MetricsWriter(path)
        for step in range(50):
            writer.write({"step": step})
        writer.close()
        finished.set()
    assert [record["step"] for record in seen.result()] == list(range(50))


def test_follower_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path, finished = tmp_path / "report.jsonl", threading.Event()
    path.write_text('{"step": 1}\n{"st')
    records = read_new_records(path, finished, poll_s=0.001)
    assert next(records) == {"step": 1}
    with path.open("a") as file:
        file.write('ep": 2}\n')
    finished.set()
    assert list(records) == [{"step": 2}]


def test_follower_of_a_file_that_never_comes_ends(tmp_path: Path) -> None:
    finished = threading.Event()
    finished.set()
    assert list(read_new_records(tmp_path / "nothing", finished)) == []


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        MetricsWriter(tmp_path / "m.jsonl").write({"loss": float("nan")})


def test_unwritable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        MetricsWriter(tmp_path / "no" / "folder.jsonl")


@pytest.mark.parametrize(("append", "lines"), [(True, 2), (False, 1)])
def test_file_is_kept_only_where_asked(tmp_path: Path, append: bool, lines: int) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("{}\n")
    writer = MetricsWriter(path, append=append)
    writer.write({"step": 1})
    writer.close()
    assert len(path.read_text().splitlines()) == lines
