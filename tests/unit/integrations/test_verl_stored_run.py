"""What verl's trainer is told at the start of a run in a bucket."""

from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.integrations.verl import stored_run

URL = "s3://bucket/runs/a"


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
