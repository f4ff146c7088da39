"""A store in memory for the tests of saves."""

from pathlib import Path

import pytest
from trainsync.storage.objects.bucket import ObjectBucket

from tests.unit.checkpoint.in_store import memory_of_every_url


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ObjectBucket:
    """The store that every URL names; ``TMPDIR`` is a directory of the test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return memory_of_every_url(monkeypatch)
