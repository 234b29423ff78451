import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from meshwright.cli.main import app
from meshwright.runtime.training.data_files import (
    TokenFiles,
    find_text,
    make_token_file,
    open_token_files,
    write_tokens,
)
from meshwright.runtime.training.samples import open_data, tokenize_paths
from meshwright.schema import ConfigError
from typer.testing import CliRunner

tokenizers = pytest.importorskip("tokenizers", reason="the extra meshwright[text]")

WORDS = ("<end>", "red", "green", "blue", "<unk>")


def written(folder: Path, name: str, ids: list[int], vocab_size: int = 100) -> Path:
    write_tokens(folder / name, [np.array(ids[:2]), np.array(ids[2:])], vocab_size=vocab_size)
    return folder / name


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize(("vocab_size", "width"), [(100, 2), (2**16, 2), (2**16 + 1, 4)])
def test_written_ids_are_read_across_files(tmp_path: Path, vocab_size: int, width: int) -> None:
    paths = [written(tmp_path, "a.bin", [1, 2, 3, 4, 5], vocab_size), written(tmp_path, "b.bin", [6, 7, 8], vocab_size)]
    np.save(tmp_path / "c.npy", np.array([9, 10], dtype=np.int32))
    files = open_token_files([*paths, tmp_path / "c.npy"])
    assert paths[0].stat().st_size == 32 + 5 * width
    assert (files.num_tokens, files.largest) == (10, 10)
    assert files.tokens(3, 7).tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert files.tokens(0, 5).tolist() == [1, 2, 3, 4, 5]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", lambda _: b"raw ids without a header, as others write them", "does not begin with the header"),
        ("a.bin", lambda _: b"", "does not begin with the header"),
        (
            "a.bin",
            lambda whole: whole[:-2],
            "is damaged: 5 ids of 2 bytes and the header take 42 bytes, the file has 40",
        ),
        ("a.bin", lambda whole: whole[:8] + struct.pack("<II", 9, 2) + whole[16:], "version 9"),
        ("a.bin", lambda whole: whole[:16] + bytes(16), "holds no tokens"),
        ("a.npy", lambda _: b"\x93NUMPY\1\0 nothing", "is damaged"),
        ("a.npy", lambda _: b"text", "is no .npy file"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, name: str, content: Callable[[bytes], bytes], message: str) -> None:
    whole = written(tmp_path, "whole.bin", [1, 2, 3, 4, 5]).read_bytes()
    (tmp_path / name).write_bytes(content(whole))
    with pytest.raises(ConfigError, match=message):
        open_token_files([tmp_path / name])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((2, 3), dtype=np.int64), r"an array \[2, 3\] of int64"),
        (np.ones(3), r"an array \[3\] of float64"),
        (np.array([3, -1]), "the token id -1"),
        (np.array([{}, None], dtype=object), "is damaged or is no array of numbers"),
        (np.array([], dtype=np.uint16), "holds no tokens"),
        (np.array([5, 100]), "token id 100; the model's vocabulary has 100"),
    ],
)
def test_array_that_is_no_row_of_ids_is_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ConfigError, match=message):
        open_data([str(tmp_path / "a.npy")], vocab_size=100)


def test_folder_with_token_files_is_those(tmp_path: Path) -> None:
    written(tmp_path, "b.bin", [3, 4])
    written(tmp_path, "a.bin", [1, 2])
    (tmp_path / "README").write_text("about these tokens")
    found = open_data([str(tmp_path)], vocab_size=5)
    assert isinstance(found, TokenFiles)
    assert found.tokens(0, 4).tolist() == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="token files and text"):
        open_data([str(tmp_path), str(tmp_path / "README")], vocab_size=256)
    with pytest.raises(ConfigError, match="--tokenizer is for text"):
        tokenize_paths([str(tmp_path)], "tokenizer.json")


def test_text_becomes_the_tokenizers_ids_with_an_end_after_each_file(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "1.txt").write_text("red green\nblue red")
    (tmp_path / "2.txt").write_text("pink")
    out = tmp_path / "out.bin"
    options = ["tokens", str(tmp_path / "1.txt"), str(tmp_path / "2.txt"), "--out", str(out)]
    done = CliRunner().invoke(app, [*options, "--tokenizer", str(tmp_path), "--end-token", "<end>"])
    assert done.exit_code == 0, done.stderr
    assert open_token_files([out]).tokens(0, 7).tolist() == [1, 2, 3, 1, 0, 4, 0]
    assert "with 7 tokens" in done.stderr
    refused = CliRunner().invoke(app, [*options, "--tokenizer", str(tmp_path), "--end-token", "<stop>"])
    assert (refused.exit_code, "has no token '<stop>'" in refused.stderr) == (2, True)


def test_long_lines_and_large_files_lose_nothing(tmp_path: Path, tokenizer: Path) -> None:
    words = ("red green blue\n" * 40_000) + ("blue " * 120_000)
    (tmp_path / "long.txt").write_text(words)
    count = make_token_file(find_text([tmp_path / "long.txt"]), tmp_path / "out.bin", tokenizer=tokenizer)
    # A line longer than a piece is cut where it comes, at most once in half a MiB: a word there may become two.
    assert abs(count - len(words.split())) <= 2


def test_tokens_of_text_are_made_once(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "a.txt"
    text.write_text("red green")
    (path,) = tokenize_paths([str(text)], str(tokenizer))
    assert (path,) == tokenize_paths([str(text)], str(tokenizer))
    assert open_data([path], vocab_size=5).tokens(0, 2).tolist() == [1, 2]
    text.write_text("blue green")
    assert tokenize_paths([str(text)], str(tokenizer)) != (path,)
    with pytest.raises(ConfigError, match="no tokenizer at"):
        tokenize_paths([str(text)], str(tmp_path / "nowhere.json"))
    tokenizer.write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer that works"):
        tokenize_paths([str(text)], str(tokenizer))
