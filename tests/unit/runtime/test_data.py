from pathlib import Path

import pytest
import torch
from meshwright.runtime.training.data_files import find_text
from meshwright.runtime.training.samples import TokenBatches
from meshwright.schema import ConfigError


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def whole_batch(folder: Path, step: int, dp_degree: int, *, seed: int = 0) -> torch.Tensor:
    corpus = find_text([folder])
    parts = [
        TokenBatches(
            corpus, seq_len=16, rows=range(4 * rank // dp_degree, 4 * (rank + 1) // dp_degree), seed=seed
        ).batch(4 * step)
        for rank in range(dp_degree)
    ]
    return torch.cat(parts)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write(tmp_path, {f"{name}.txt": bytes(range(start, start + 100)) for name, start in (("b", 101), ("a", 1))})


def test_files_are_joined_in_sorted_order(texts: Path) -> None:
    assert find_text([texts]).tokens(95, 12).tolist() == [*range(96, 108)]


def test_binary_hidden_and_empty_files_are_left_out(texts: Path) -> None:
    write(
        texts, {"image.png": b"PNG\0\1", ".git/config": b"text", ".hidden": b"text", "empty": b"", "sub/c.txt": b"more"}
    )
    assert [path.name for path in find_text([texts]).files] == ["a.txt", "b.txt", "c.txt"]


def test_default_is_the_standard_library() -> None:
    corpus = find_text()
    assert all(path.suffix == ".py" for path in corpus.files)
    assert corpus.num_tokens > 1_000_000


@pytest.mark.parametrize("dp_degree", [2, 4])
def test_global_batch_does_not_depend_on_the_layout(texts: Path, dp_degree: int) -> None:
    assert torch.equal(whole_batch(texts, 3, dp_degree), whole_batch(texts, 3, 1))


def test_batches_depend_on_step_and_seed_only(texts: Path) -> None:
    batch = whole_batch(texts, 3, 1)
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, whole_batch(texts, 3, 1))
    assert not torch.equal(batch, whole_batch(texts, 4, 1))
    assert not torch.equal(batch, whole_batch(texts, 3, 1, seed=1))
    assert (batch.diff(dim=1) == 1).all()  # each row is a piece of the stream, across the files' border as well


def test_last_byte_can_be_read(tmp_path: Path) -> None:
    corpus = find_text([write(tmp_path, {"a": bytes(range(1, 18))})])
    assert TokenBatches(corpus, seq_len=16, rows=range(1)).batch(0).tolist() == [list(range(1, 18))]


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such data file or folder"):
        find_text([tmp_path / "nowhere"])


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no text found"):
        find_text([write(tmp_path, {"weights.bin": b"\0\0"})])


def test_too_little_text_is_refused_with_the_numbers(tmp_path: Path) -> None:
    corpus = find_text([write(tmp_path, {"a": b"short"})])
    with pytest.raises(
        ConfigError, match=r"the data has 5 B in 1 files; one sequence of 16 tokens and its last target needs 17"
    ):
        TokenBatches(corpus, seq_len=16, rows=range(1))


def test_fingerprint_tells_different_data(texts: Path) -> None:
    before = find_text([texts]).fingerprint
    assert before == find_text([texts]).fingerprint
    write(texts, {"c.txt": b"x"})
    assert find_text([texts]).fingerprint != before
