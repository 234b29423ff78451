import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshwright.runtime import ParallelModel, build_optimizer, parallelize
from meshwright.runtime.training.checkpoint import (
    CheckpointInfo,
    CheckpointWriter,
    DamagedCheckpointError,
    SafeReader,
    TrainingProgress,
    checkpoint_state,
    load_checkpoint,
)
from meshwright.runtime.training.options import TrainOptions, list_checkpoints, prepare_options
from meshwright.schema import ConfigError, MeshwrightError
from small_jobs import losses, small_plan, train_here


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(seed: int = 0, **model: bool) -> tuple[ParallelModel, torch.optim.Optimizer]:
    parallel = parallelize(None, small_plan(**model), seed=seed)
    optimizer = build_optimizer(parallel, learning_rate=1e-2)
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(seed))
    parallel.forward_backward(tokens)
    optimizer.step()
    optimizer.zero_grad()
    return parallel, optimizer


def everything(model: ParallelModel, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [parameter.detach().clone() for parameter in model.parameters()] + [state.clone() for state in states]


def without_checksums(folder: Path) -> Path:
    """The checkpoint as older versions wrote it, or as somebody leaves it who changes files and knows of checksums."""
    info = CheckpointInfo.load(folder / "checkpoint.json")
    (folder / "checkpoint.json").write_text(info.model_dump_json(exclude={"files", "content_sha256"}))
    return folder


class Forged:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("tied", [False, True])
def test_loaded_state_is_what_was_saved(tmp_path: Path, tied: bool) -> None:
    model, optimizer = trained(seed=1, tied=tied)
    assert ("lm_head.weight" in checkpoint_state(model, optimizer)["model"]) != tied
    folder = CheckpointWriter(tmp_path, model, optimizer).save(TrainingProgress(step=7, seed=3))
    other_model, other_optimizer = trained(seed=2, tied=tied)
    info = load_checkpoint(folder, other_model, other_optimizer)
    assert (info.step, info.seed) == (7, 3)
    pairs = zip(everything(model, optimizer), everything(other_model, other_optimizer), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert [g["lr"] for g in other_optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]


@pytest.mark.usefixtures("group")
def test_last_two_whole_checkpoints_stay(tmp_path: Path) -> None:
    model, optimizer = trained()
    (tmp_path / ".step-00000009.partial").mkdir()
    (tmp_path / "step-00000008").mkdir()  # of a save that was cut short elsewhere: it lacks its last file
    for step in (1, 2, 3):
        CheckpointWriter(tmp_path, model, optimizer).save(TrainingProgress(step=step, seed=0))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]


@pytest.mark.usefixtures("group")
def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = CheckpointWriter(tmp_path, *trained()).save(TrainingProgress(step=1, seed=0))
    with pytest.raises(ConfigError, match="is of another model"):
        load_checkpoint(folder, *trained(tied=True))


@pytest.mark.usefixtures("group")
def test_forged_index_is_refused_and_not_run(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = without_checksums(CheckpointWriter(tmp_path, model, optimizer).save(TrainingProgress(step=1, seed=0)))
    harmed = tmp_path / "harmed"
    (folder / ".metadata").write_bytes(pickle.dumps(Forged(harmed)))
    with pytest.raises(ConfigError, match=r"is not the index of a checkpoint: it names (posix|nt)\.mkdir"):
        load_checkpoint(folder, model, optimizer)
    assert not harmed.exists()
    with pytest.raises(BaseException):  # noqa: B017 - what torch's own reader makes of it: it runs it, then fails
        dcp.load({}, storage_reader=dcp.FileSystemReader(folder))
    assert harmed.exists()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("in_model", [True, False])
def test_forged_value_is_refused_and_not_run(tmp_path: Path, in_model: bool) -> None:
    model, optimizer = trained()
    folder = without_checksums(CheckpointWriter(tmp_path, model, optimizer).save(TrainingProgress(step=1, seed=0)))
    index, harmed = SafeReader(folder).read_metadata(), tmp_path / "harmed"
    name = next(name for name in index.state_dict_metadata if name.startswith("model.") == in_model)
    (folder / ".metadata").unlink()
    dcp.save({name: Forged(harmed)}, storage_writer=dcp.FileSystemWriter(folder, overwrite=True))
    forged = SafeReader(folder).read_metadata()
    index.state_dict_metadata[name] = forged.state_dict_metadata[name]
    index.storage_data.update(forged.storage_data)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(MeshwrightError, match="checkpoint"):
        load_checkpoint(folder, model, optimizer)
    assert not harmed.exists()


@pytest.mark.usefixtures("group")
def test_index_that_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    folder = CheckpointWriter(tmp_path, *trained()).save(TrainingProgress(step=1, seed=0))
    index = SafeReader(folder).read_metadata()
    next(iter(index.storage_data.values())).relative_path = "../../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ConfigError, match="points outside its folder"):
        SafeReader(folder)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["/dev/zero", "../secret", "pipe"])
def test_a_list_of_files_that_names_others_is_not_followed(tmp_path: Path, name: str) -> None:
    model, optimizer = trained()
    folder = CheckpointWriter(tmp_path / "all", model, optimizer).save(TrainingProgress(step=1, seed=0))
    (folder.parent / "secret").write_text("a secret")
    os.mkfifo(folder / "pipe")
    path = folder / "checkpoint.json"
    path.write_text(CheckpointInfo.load(path).replace(files={name: "0" * 64}).sealed().model_dump_json())
    with pytest.raises(DamagedCheckpointError, match="no file of this checkpoint"):
        load_checkpoint(folder, model, optimizer)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", pickle.dumps([1, 2])])
def test_damaged_index_is_named(tmp_path: Path, content: bytes) -> None:
    folder = CheckpointWriter(tmp_path, *trained()).save(TrainingProgress(step=1, seed=0))
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match="is not the index of a checkpoint"):
        SafeReader(folder)


def test_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan()
    options = TrainOptions(steps=5, learning_rate=1e-2, checkpoint_dir=str(tmp_path / "c"), checkpoint_every=2)
    whole = losses(train_here(monkeypatch, plan, options, tmp_path / "whole.jsonl"))
    newest = list_checkpoints(tmp_path / "c")[-1]
    newest.rename(newest.with_name("elsewhere"))
    resumed = train_here(monkeypatch, plan, options.replace(resume=True), tmp_path / "resumed.jsonl")
    assert [record["step"] for record in resumed if "step" in record] == [5]
    assert losses(resumed) == whole[4:]
    with pytest.raises(ConfigError, match="--steps 5 leaves none"):
        train_here(monkeypatch, plan, options.replace(resume=True), tmp_path / "again.jsonl")
    dist.destroy_process_group()


@pytest.mark.long
def test_automatic_saves_are_as_frequent_as_faults_make_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainOptions(
        steps=24, checkpoint_dir=str(tmp_path / "c"), checkpoint_every="auto", keep_checkpoints=24,
        mtbf_hours_per_device=1e-6,
    )  # fmt: skip
    train_here(monkeypatch, small_plan(), options, tmp_path / "often.jsonl")
    often = [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "c")]
    options = options.replace(checkpoint_dir=str(tmp_path / "d"), mtbf_hours_per_device=1e9)
    train_here(monkeypatch, small_plan(), options, tmp_path / "seldom.jsonl")
    seldom = [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "d")]
    assert often[0] == seldom[0] == 5
    assert often[-1] == seldom[-1] == 24
    assert len(seldom) == 2 < len(often)


def test_hours_between_faults_are_refused_where_the_interval_is_given(tmp_path: Path) -> None:
    options = TrainOptions(checkpoint_dir=str(tmp_path), checkpoint_every=3, mtbf_hours_per_device=10)
    with pytest.raises(ConfigError, match="--checkpoint-every auto"):
        prepare_options(small_plan(), options)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("in_background", [False, True])
def test_any_byte_that_is_changed_is_detected_or_harmless(tmp_path: Path, in_background: bool) -> None:
    random = Random(3)
    model, optimizer = trained(seed=1)
    original = everything(model, optimizer)
    writer = CheckpointWriter(tmp_path / "all", model, optimizer, keep=20, in_background=in_background)
    for step in range(1, 11):
        writer.save(TrainingProgress(step=step))
    writer.finish()
    outcomes = []
    for folder in list_checkpoints(tmp_path / "all"):
        for path in sorted(folder.iterdir()):
            content = path.read_bytes()
            path.write_bytes(damaged(content, random))
            try:
                load_checkpoint(folder, model, optimizer)
                outcomes.append("harmless")
            except DamagedCheckpointError as error:
                assert path.name in error.message
                outcomes.append("detected")
            pairs = zip(original, everything(model, optimizer), strict=True)
            assert all(torch.equal(mine, other) for mine, other in pairs)
            path.write_bytes(content)
    assert len(outcomes) == 30
    assert outcomes.count("detected") >= 25  # a blank between two fields of the JSON means nothing


def damaged(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content))
    return (
        content[:at]
        if random.random() < 0.3
        else content[:at] + bytes([content[at] ^ (1 << random.randrange(8))]) + content[at + 1 :]
    )


@pytest.mark.long
def test_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan()
    options = TrainOptions(steps=5, learning_rate=1e-2, checkpoint_dir=str(tmp_path / "c"), checkpoint_every=2)
    unbroken = losses(train_here(monkeypatch, plan, options, tmp_path / "unbroken.jsonl"))
    older, newest = list_checkpoints(tmp_path / "c")
    file = newest / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    records = train_here(monkeypatch, plan, options.replace(resume=True), tmp_path / "resumed.jsonl")
    assert records[0]["note"].startswith(f"{file} is not what was written")
    assert "step-00000005 is set aside as step-00000005.damaged" in records[0]["note"]
    assert losses(records) == unbroken[4:]
    assert [path.name for path in list_checkpoints(tmp_path / "c")] == [older.name, newest.name]
    for folder in list_checkpoints(tmp_path / "c"):
        (folder / ".metadata").unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint under .* can be read") as error:
        train_here(monkeypatch, plan, options.replace(resume=True), tmp_path / "none.jsonl")
    assert len(error.value.details) == 2
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_folder_that_vanishes_is_said_once_and_made_anew(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "c", *trained())
    (tmp_path / "c").mkdir()
    assert writer.poll() is None
    folder = writer.save(TrainingProgress(step=1))
    assert writer.poll() is None
    shutil.rmtree(tmp_path / "c")
    assert str(folder) in (writer.poll() or "")
    assert writer.poll() is None
    writer.save(TrainingProgress(step=2))
    assert [path.name for path in list_checkpoints(tmp_path / "c")] == ["step-00000002"]


@pytest.mark.usefixtures("group")
def test_checkpoint_of_an_older_version_is_read_unchecked(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = without_checksums(CheckpointWriter(tmp_path, model, optimizer).save(TrainingProgress(step=1)))
    assert load_checkpoint(folder, model, optimizer).step == 1
