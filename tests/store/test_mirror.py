"""A mirror follows a volume into a real S3 server, through deaths of both."""

import os
import signal
from pathlib import Path

import pytest
from trainsync.failpoints import STORE, enabled
from trainsync.storage.layout import RunDirectory

from tests.store.conftest import Place
from tests.store.processes.forked import run_killed
from tests.store.processes.mirroring import mirror_of
from tests.store.servers.server import Server, serving
from tests.unit.cli.commands import document, findings
from tests.waiting import eventually


def steps(url: str) -> list[int]:
    return [save["step"] for save in document("ls", url)["saves"] if save["kind"] == "checkpoint"]


@pytest.mark.parametrize("point", ["object", "uploaded", "manifest"])
def test_what_a_monitor_that_was_killed_amid_a_copy_began_the_next_one_finishes(
    point: str, place: Place, run: RunDirectory
) -> None:
    run_killed("tests.store.processes.mirroring", run.root, place.url(), point)
    assert steps(place.url()) == ([30] if point == "manifest" else [])
    mirror = mirror_of(run.root, place.url())
    mirror.start()
    try:
        eventually(lambda: mirror.state.last == 30 and mirror.state.error is None)
    finally:
        assert mirror.stop(20)
    assert steps(place.url()) == [30]
    assert {code for _, code, _ in findings("verify", place.url(), code=0)} <= {"unlisted"}


def test_a_server_that_is_killed_amid_a_copy_is_followed_again_when_it_is_back(
    server: Server, run: RunDirectory, tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    del place  # its environment
    root = tmp_path / "server/data"
    with serving(server.program, root) as first:
        url = f"s3://{first.bucket('bucket-of-a-mirror').name}/a"
        monkeypatch.setenv("AWS_ENDPOINT_URL", first.endpoint)

        def die(point: str) -> None:
            if point == "object":
                os.kill(first.pid, signal.SIGKILL)

        mirror = mirror_of(run.root, url)
        with enabled(STORE, die):
            mirror.start()
            try:
                eventually(lambda: mirror.state.error is not None, 60)
                assert mirror.state.behind_since is not None
            finally:
                assert mirror.stop(60)
    with serving(server.program, root) as second:
        monkeypatch.setenv("AWS_ENDPOINT_URL", second.endpoint)
        mirror = mirror_of(run.root, url)
        mirror.start()
        try:
            eventually(lambda: mirror.state.last == 30)
            assert mirror.state.error is None
        finally:
            assert mirror.stop(20)
        assert {code for _, code, _ in findings("verify", url, code=0)} <= {"unlisted"}


def test_a_step_that_a_repair_set_aside_is_put_again(place: Place, run: RunDirectory) -> None:
    for step in (20, 30):
        document("cp", run.root, place.url(), "--step", step)
    next(place.files.rglob("global_step_30/**/checkpoint_rank_0.pt")).unlink()
    document("repair", place.url())
    assert steps(place.url()) == [20]
    mirror = mirror_of(run.root, place.url())
    mirror.start()
    try:
        eventually(lambda: mirror.state.last == 30)
    finally:
        assert mirror.stop(20)
    assert steps(place.url()) == [20, 30]
    assert {code for _, code, _ in findings("verify", place.url(), code=0)} == {"unlisted"}
