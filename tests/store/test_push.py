"""A step in a bucket is merged and pushed to a hub."""

import tempfile
from pathlib import Path

import pytest

from tests.store.conftest import Place
from tests.unit.checkpoint.hub.hub_server import local_hub
from tests.unit.cli.commands import document
from tests.unit.cli.small_models import assert_is, save, small_model


def test_a_step_in_a_bucket_is_pushed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    document("cp", save(model, tmp_path / "run"), place.url())
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    with local_hub(monkeypatch, tmp_path) as hub:
        repo = hub.make("me/tiny")
        document("push", place.url(), "me/tiny", "--step", "latest")
    down = tmp_path / "down"
    down.mkdir()
    for name, data in repo.files.items():
        (down / name).write_bytes(data)
    assert_is(down, model)
    assert list(work.iterdir()) == []
