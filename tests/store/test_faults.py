"""Copies meet a bad network, a store that refuses, and SIGKILL: what is committed is whole."""

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from trainsync.failpoints import COPY, POINTS, STORE, enabled
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects.errors import StoreRefusedError, StoreUnavailableError

from tests.store.conftest import FAST, Place
from tests.store.processes.forked import run_killed
from tests.store.servers.fault_proxy import Fault
from tests.store.servers.server import ACCESS, SECRET, Server, serving
from tests.unit.cli.commands import call, document, findings

MANIFEST = r"manifests/checkpoint/global_step_30\.json$"
POINTER = r"latest_checkpointed_iteration\.txt$"
SHARD = r"objects/global_step_30/.*\.pt$"
COMMITTED = {"store.manifest", "store.pointer", "copy.manifest", "copy.pointer"}


def kill(point: str, count: int, *arguments: object) -> None:
    """Run a command that is killed at that point."""
    run_killed("tests.store.processes.killed", point, count, *arguments)


@pytest.mark.parametrize("point", [point for point in POINTS[STORE] if point != "superseding"])
def test_a_copy_into_a_bucket_that_is_killed_is_finished_by_the_next(
    place: Place, run: RunDirectory, point: str
) -> None:
    point = f"store.{point}"
    kill(point, 1, "cp", run.root, place.url(), "--threads", 1)
    found = document("ls", place.url(), code=0)
    steps = [save["step"] for save in found["saves"]]
    assert steps == ([30] if point in COMMITTED else [])
    if point == "store.pointer":
        assert found["saves"][0]["pointedAt"]
    left = findings("verify", place.url(), code=0)
    assert {code for _, code, _ in left} <= {"unlisted", "pointer_behind"}
    again = document("cp", run.root, place.url())
    assert again["saves"][0]["wasThere"] is (point in COMMITTED)
    assert (place.files / "runs/a/latest_checkpointed_iteration.txt").read_text() == "30\n"
    assert {code for _, code, _ in findings("verify", place.url(), code=0)} <= {"unlisted"}


@pytest.mark.parametrize("point", POINTS[COPY])
def test_a_copy_onto_a_volume_that_is_killed_is_finished_by_the_next(
    place: Place, run: RunDirectory, tmp_path: Path, point: str
) -> None:
    document("cp", run.root, place.url())
    back, point = tmp_path / "back", f"copy.{point}"
    kill(point, 2 if point == "copy.promoting" else 1, "cp", place.url(), back)
    saves = document("ls", back, code=0)["saves"]
    assert [save["step"] for save in saves] == ([30] if point in COMMITTED else [])
    assert all(severity == "leftover" for severity, _, _ in findings("verify", back, code=0))
    before = len(place.proxy.asked)
    again = document("cp", place.url(), back)
    assert again["saves"][0]["wasThere"] is (point in COMMITTED)
    if point == "copy.promoted":
        shards = [path for _, path in place.proxy.asked[before:] if "/objects/" in path]
        assert shards == [], "what the first one had copied is not fetched again"
    left = {code for _, code, _ in findings("verify", back, code=0)}
    assert left <= ({"staging"} if point in COMMITTED else set())
    assert (back / "latest_checkpointed_iteration.txt").read_text() == "30\n"


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.DONE_BUT_500])
@pytest.mark.parametrize("pattern", [MANIFEST, POINTER, SHARD, "probe/"])
def test_a_put_that_was_done_and_whose_reply_is_lost_counts(
    place: Place, run: RunDirectory, fault: Fault, pattern: str
) -> None:
    rule = place.proxy.break_next(fault, "PUT", pattern)
    assert document("cp", run.root, place.url())["saves"][0]["wasThere"] is False
    assert rule.left == 0
    assert findings("verify", place.url(), code=0) == []
    assert (place.files / "runs/a/latest_checkpointed_iteration.txt").read_text() == "30\n"


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.DONE_BUT_500])
def test_a_pointer_that_was_replaced_and_whose_reply_is_lost_has_moved(
    place: Place, run: RunDirectory, fault: Fault
) -> None:
    document("cp", run.root, place.url(), "--step", 10)
    rule = place.proxy.break_next(fault, "PUT", POINTER)
    document("cp", run.root, place.url())
    assert rule.left == 0
    assert (place.files / "runs/a/latest_checkpointed_iteration.txt").read_text() == "30\n"


@pytest.mark.parametrize(("method", "pattern"), [("PUT", ""), ("GET", ""), ("PUT", MANIFEST)])
def test_a_store_that_wants_less_is_asked_again(
    place: Place, run: RunDirectory, method: str, pattern: str
) -> None:
    rule = place.proxy.break_next(Fault.REFUSED, method, pattern, left=2)
    document("cp", run.root, place.url())
    assert rule.left == 0
    assert findings("verify", place.url(), code=0) == []


def test_a_store_that_never_answers_well_is_given_up_after_a_bounded_number_of_tries(
    place: Place,
) -> None:
    rule = place.proxy.break_next(Fault.REFUSED, "GET", left=1000)
    with pytest.raises(StoreUnavailableError, match="503, SlowDown, also when it was asked again"):
        place.open().get("x")
    assert 1000 - rule.left == 9  # three tries of ours, of three of obstore's


@pytest.mark.parametrize("fault", [Fault.TRUNCATED, Fault.CORRUPTED])
def test_a_body_that_is_cut_or_changed_on_the_way_is_read_again(
    place: Place, run: RunDirectory, tmp_path: Path, fault: Fault
) -> None:
    document("cp", run.root, place.url())
    rule = place.proxy.break_next(fault, "GET", SHARD)
    document("cp", place.url(), tmp_path / "back")
    assert rule.left == 0
    assert findings("verify", tmp_path / "back", code=0) == []


def test_bytes_that_are_always_wrong_are_never_committed(
    place: Place, run: RunDirectory, tmp_path: Path
) -> None:
    document("cp", run.root, place.url())
    place.proxy.break_next(Fault.CORRUPTED, "GET", SHARD, left=1000)
    result = call("cp", place.url(), tmp_path / "back")
    assert result.exit_code == 1
    assert "was not copied" in result.stderr
    assert document("ls", tmp_path / "back")["saves"] == []


def test_an_upload_in_parts_survives_lost_replies_and_refusals(place: Place) -> None:
    size = 4 * (5 << 20)
    data = bytes(range(256)) * (size // 256)
    for fault, method, pattern in (
        (Fault.LOST_REPLY, "PUT", "partNumber=2"),
        (Fault.REFUSED, "PUT", "partNumber=3"),
        (Fault.REFUSED, "POST", "uploads"),
        (Fault.LOST_REPLY, "POST", "uploadId="),
    ):
        bucket = place.open()
        key = f"o{fault.name}{method}"
        rule = place.proxy.break_next(fault, method, pattern)
        bucket.upload(key, iter([data]), size)
        assert rule.left == 0
        assert b"".join(bucket.blocks(key, size)) == data


def test_credentials_that_expire_amid_a_copy_end_it_and_it_is_done_again(
    place: Place, run: RunDirectory
) -> None:
    rule = place.proxy.break_next(
        Fault.REFUSED, "PUT", SHARD, left=1000, status=400, code="ExpiredToken", after=1
    )
    result = call("cp", run.root, place.url(), "--threads", 1)
    assert result.exit_code == 3
    assert "the credentials have expired (ExpiredToken)" in result.stderr
    assert document("ls", place.url())["saves"] == []
    rule.left = 0
    document("cp", run.root, place.url())


def test_a_credential_that_may_not_list_is_refused_in_a_sentence(
    place: Place, run: RunDirectory
) -> None:
    place.proxy.break_next(
        Fault.REFUSED, "GET", "list-type", left=1000, status=403, code="AccessDenied"
    )
    result = call("cp", run.root, place.url())
    assert result.exit_code == 3
    assert "access is denied (403, AccessDenied)" in result.stderr


def test_wrong_settings_are_one_sentence_without_a_secret(
    place: Place, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = f"s3://{place.name}-none/x"
    for arguments, expected in (
        (("ls", missing), "there is no such bucket"),
        (("cp", run.root, missing), "there is no such bucket"),
        (
            ("ls", place.url(), "--region", "us-west-2"),
            "the region is wrong, it is in eu-central-1",
        ),
        (("ls", place.url(), "--endpoint", "http://127.0.0.1:1"), "the connection was refused"),
        (("ls", place.url(), "--endpoint", "https://name.invalid"), "cannot be resolved"),
    ):
        result = call(*arguments)  # type: ignore[arg-type]
        assert (result.exit_code, result.stdout) == (3, ""), result.stderr
        assert expected in result.stderr
        assert len(result.stderr.splitlines()) == 1
    for name, value, expected in (
        ("AWS_SECRET_ACCESS_KEY", "another", "the secret key does not belong"),
        ("AWS_ACCESS_KEY_ID", "AKIAOTHEROTHEROTHER", "the access key is not known"),
    ):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            result = call("ls", place.url())
        assert result.exit_code == 3
        assert expected in result.stderr
        for secret in (value, SECRET, ACCESS, "Signature=", "AWS4"):
            assert secret not in result.stderr + result.stdout


def test_an_error_in_python_has_no_secret_either(place: Place) -> None:
    bucket = place.open(credentials={"access_key_id": ACCESS, "secret_access_key": "wrong"})
    with pytest.raises(StoreRefusedError) as caught:
        bucket.get("x")
    told = "".join(map(str, (caught.value, caught.value.__cause__, bucket.__dict__)))
    assert not re.search(rf"{ACCESS}|wrong|AWS4", told)
    assert caught.value.__suppress_context__


def test_objects_of_a_killed_copy_are_pruned_when_they_are_old(
    place: Place, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    document("cp", run.root, place.url(), "--step", 10)
    kill("store.object", 1, "cp", run.root, place.url(), "--threads", 1)
    assert document("prune", place.url(), "--keep", 5, "--yes")["orphans"] == []
    monkeypatch.setattr("trainsync.storage.objects.removal.ORPHAN_SECONDS", -60.0)
    (orphan,) = document("prune", place.url(), "--keep", 5, "--yes")["orphans"]
    assert orphan["step"] == 30
    assert not [key for key in place.objects() if "global_step_30" in key]
    assert [save["step"] for save in document("ls", place.url())["saves"]] == [10]
    assert findings("verify", place.url(), code=0) == []


def test_a_copy_that_took_too_long_commits_nothing(
    place: Place, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainsync.storage.copying.store.LONGEST_COPY_SECONDS", -1.0)
    result = call("cp", run.root, place.url())
    assert result.exit_code == 3
    assert "nothing was committed" in result.stderr
    assert document("ls", place.url())["saves"] == []


def test_a_slow_transfer_has_more_time_than_a_call(place: Place) -> None:
    limits = replace(FAST, call_seconds=2.5, transfer_seconds=20.0, retries=0)
    bucket, data = place.open(limits=limits), bytes(3 * FAST.part_bytes)
    for method, pattern in (("PUT", "partNumber=2"), ("GET", "/o$")):
        rule = place.proxy.break_next(Fault.DELAYED, method, pattern, seconds=5.0)
        if method == "PUT":
            bucket.upload("o", iter([data]), len(data))
        else:
            assert b"".join(bucket.blocks("o", len(data))) == data
        assert rule.left == 0
    place.proxy.break_next(Fault.DELAYED, "GET", "/o$", left=1000, seconds=5.0)
    with pytest.raises(StoreUnavailableError, match="it did not answer in time"):
        bucket.get("o")


def test_a_store_that_hangs_is_given_up(place: Place, server: Server) -> None:
    limits = replace(FAST, call_seconds=2.0, retries=1, retry_seconds=3.0)
    bucket = place.open(limits=limits)
    bucket.create("x", b"x")
    os.kill(server.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # all its threads
    try:
        started = time.monotonic()
        with pytest.raises(StoreUnavailableError, match="it did not answer in time"):
            bucket.get("x")
        assert time.monotonic() - started < 20
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert bucket.get("x").data == b"x"


def test_a_server_that_is_killed_amid_a_copy_has_no_half_step(
    server: Server, run: RunDirectory, tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    del place  # its environment
    root = tmp_path / "server/data"
    with serving(server.program, root) as first:
        files = first.bucket("bucket-of-a-killed-server")
        monkeypatch.setenv("AWS_ENDPOINT_URL", first.endpoint)

        def die(point: str) -> None:
            if point == "object":
                os.kill(first.pid, signal.SIGKILL)

        with enabled(STORE, die):
            result = call("cp", run.root, f"s3://{files.name}/a", "--threads", 1)
        assert result.exit_code == 3
        assert len(result.stderr.splitlines()) == 1
    with serving(server.program, root) as second:
        monkeypatch.setenv("AWS_ENDPOINT_URL", second.endpoint)
        assert document("ls", f"s3://{files.name}/a")["saves"] == []
        document("cp", run.root, f"s3://{files.name}/a")
        left = findings("verify", f"s3://{files.name}/a", code=0)
        assert {code for _, code, _ in left} == {"unlisted"}
