"""What verl's trainer is told at the start of a run in a bucket."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load import stored
from trainsync.integrations.verl import stored_run
from trainsync.storage.objects import keys
from trainsync.storage.objects.bucket import ObjectBucket

from tests.unit.storage.objects.memory import CHECKPOINT, manifest_of, memory, save

URL = "s3://bucket/runs/a"


class Config(SimpleNamespace):
    """``trainer`` of verl's configuration, of a run in the bucket."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**{"default_local_dir": URL, "resume_mode": "auto", **others})

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ObjectBucket:
    """The run's, with a ``data.pt`` of steps 1 and 2."""
    made = memory()
    for module in (stored_run, stored):
        monkeypatch.setattr(module, "open_run_store", lambda url: made)
    stored._open.cache_clear()
    monkeypatch.delenv("TRAINSYNC_CHECKPOINT_DIR", raising=False)
    monkeypatch.setenv(stored_run.SHARED_DIR, str(tmp_path))
    for step in (1, 2):
        data = b"data of step %d" % step
        manifest = manifest_of(step, data)
        entry = replace(manifest.files[0], path="data.pt")
        save(made, replace(manifest, files=(entry,)), data)
    return made


def found_by_verl(config: Config) -> bytes | None:
    """``data.pt`` of the step that verl's trainer goes on from; None: it begins at step 0."""
    with stored_run.resumable(SimpleNamespace(config=SimpleNamespace(trainer=config))):
        if config.resume_mode == "resume_path":
            return (Path(config.resume_from_path) / "data.pt").read_bytes()
        directory = Path(config.default_local_dir)
        pointer = directory / "latest_checkpointed_iteration.txt"
        if not pointer.exists():
            return None
        return (directory / f"global_step_{int(pointer.read_text())}/data.pt").read_bytes()


@pytest.mark.usefixtures("bucket")
def test_verl_finds_the_newest_step_and_nothing_is_left(tmp_path: Path) -> None:
    config = Config()
    assert found_by_verl(config) == b"data of step 2"
    assert (config.default_local_dir, list(tmp_path.iterdir())) == (URL, [])


def test_a_run_whose_pointer_is_gone_does_not_begin_at_step_0(bucket: ObjectBucket) -> None:
    bucket.delete([keys.pointer(CHECKPOINT)])
    with pytest.raises(CorruptCheckpointError, match="names no step, and step 2 is committed"):
        found_by_verl(Config())
    bucket.delete([keys.manifest(CHECKPOINT, step) for step in (1, 2)])
    assert found_by_verl(Config()) is None


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("place", [URL, "s3:/bucket/runs/a", "/home/me/s3:/bucket/runs/a"])
def test_a_step_of_the_run_is_named_by_each_path_that_the_ranks_take_for_it(place: str) -> None:
    path = f"{place}/global_step_1"
    config = Config(resume_mode="resume_path", resume_from_path=path)
    assert found_by_verl(config) == b"data of step 1"
    assert config.resume_from_path == path


def config(named: str) -> Any:
    return SimpleNamespace(default_local_dir=named, resume_mode="disable")


@pytest.mark.parametrize(
    ("named", "run", "expected"),
    [
        ("/volume/run", "/volume/run", None),
        ("checkpoints", "/volume/run", None),
        ("checkpoints", None, None),
        (URL, URL, URL),
        (f"{URL}/", URL, URL),
        (URL, None, URL),
    ],
)
def test_the_runs_store_is_verls_default_local_dir(
    monkeypatch: pytest.MonkeyPatch, named: str, run: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("TRAINSYNC_CHECKPOINT_DIR", raising=False)
    if run is not None:
        monkeypatch.setenv("TRAINSYNC_CHECKPOINT_DIR", run)
    assert stored_run.store_of(config(named)) == expected


@pytest.mark.parametrize(
    ("named", "run"), [("checkpoints", URL), (URL, "/volume/run"), ("s3://other/runs/a", URL)]
)
def test_another_place_than_the_runs_is_refused(
    monkeypatch: pytest.MonkeyPatch, named: str, run: str
) -> None:
    monkeypatch.setenv("TRAINSYNC_CHECKPOINT_DIR", run)
    with pytest.raises(ValueError, match=f"default_local_dir is '{named}'; expected '{run}'"):
        stored_run.store_of(config(named))


def test_transfer_queue_on_several_nodes_needs_a_directory_that_they_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("TRAINSYNC_CHECKPOINT_DIR", raising=False)
    monkeypatch.delenv(stored_run.SHARED_DIR, raising=False)
    nodes = [{"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)

    def begin(mode: str) -> None:
        trainer = SimpleNamespace(trainer_mode=mode, config=SimpleNamespace(trainer=config(URL)))
        with stored_run.resumable(trainer):
            pass

    begin("separate_async")  # the other node is gone
    nodes.append({"Alive": True})
    begin("sync")
    with pytest.raises(ValueError, match=f"on each of 2 nodes; expected {stored_run.SHARED_DIR}"):
        begin("separate_async")
    left = tmp_path / f"{stored_run._prefix(URL)}of-a-killed-trainer"
    left.mkdir()
    monkeypatch.setenv(stored_run.SHARED_DIR, str(tmp_path))
    begin("separate_async")
    assert not left.exists()
