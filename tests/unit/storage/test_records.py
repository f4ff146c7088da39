import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import FileEntry, ParticipantFailure, SaveOutcome

from tests.unit.monitor.saves import CHECKPOINT, FIRST, directory, receipt

ENTRY = FileEntry("actor/m.pt", 3, "xxh3-128:" + "0" * 32)
BASE = {"key": "objects/global_step_1/w/m.pt", "block": 4096, "own": "AQ=="}


def written(tmp_path: Path) -> Path:
    save = directory(tmp_path, FIRST, 7)
    return receipts.write_receipt(save, receipt(FIRST, 7, 1, CHECKPOINT, ENTRY))


def test_a_receipt_reads_back_as_it_was_written(tmp_path: Path) -> None:
    assert receipts.read_receipt(written(tmp_path)) == receipt(FIRST, 7, 1, CHECKPOINT, ENTRY)


def test_a_receipt_is_camel_case_json_as_the_contract_says(tmp_path: Path) -> None:
    data = json.loads(written(tmp_path).read_bytes())
    assert set(data) == {
        "version", "kind", "step", "attempt", "incarnation", "component", "rank", "worldSize",
        "files", "seconds", "blockedSeconds", "queueSeconds", "slotSeconds", "stagedBytes",
        "coordinates", "replaces", "kept", "rescued", "based",
    }  # fmt: skip


def test_unknown_fields_of_a_newer_release_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "novelty": 1}))
    assert receipts.read_receipt(path).rank == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 3}, "version"),
        ({"version": 2}, "names parts of files, which a volume does not have"),
        ({"based": {"actor/m.pt": BASE}}, "names parts of files, which a volume does not have"),
        ({"rank": -1}, "rank"),
        ({"step": "many"}, "step"),
        ({"worldSize": 0}, "worldSize"),
        ({"component": "../x"}, "component"),
        ({"files": [{"path": "a", "bytes": 1, "digest": "md5:00"}]}, "digest"),
        ({"rank": 2}, "speaks for model.2.json, not for model.1.json"),
    ],
)
def test_a_wrong_receipt_is_refused_by_field(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = written(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    with pytest.raises(DamagedFileError, match=said):
        receipts.read_receipt(path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff"])
def test_a_torn_receipt_is_damaged_not_a_crash(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path)
    path.write_bytes(data)
    with pytest.raises(DamagedFileError):
        receipts.read_receipt(path)


def test_a_link_in_place_of_a_receipt_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    target = path.rename(tmp_path / "elsewhere")
    path.symlink_to(target)
    with pytest.raises(DamagedFileError, match="not a regular file"):
        receipts.read_receipt(path)


def test_a_failure_reads_back_with_its_cause(tmp_path: Path) -> None:
    failure = ParticipantFailure(
        kind=CHECKPOINT, step=7, attempt=0, incarnation=FIRST.incarnation, component="model",
        rank=1, error="OSError: disk",
    )  # fmt: skip
    path = receipts.write_failure(directory(tmp_path, FIRST, 7), failure)
    assert receipts.read_failure(path) == failure


def test_an_outcome_is_one_of_two_files_and_committed_wins(tmp_path: Path) -> None:
    save = directory(tmp_path, FIRST, 7)
    assert receipts.read_outcome(save) is None
    receipts.write_outcome(save, SaveOutcome(kind=CHECKPOINT, step=7, error="why"))
    aborted = receipts.read_outcome(save)
    assert aborted is not None
    assert aborted.error == "why"
    receipts.write_outcome(save, SaveOutcome(kind=CHECKPOINT, step=7, manifest_digest="sha256:0"))
    committed = receipts.read_outcome(save)
    assert committed is not None
    assert committed.manifest_digest == "sha256:0"


def test_a_time_without_its_zone_is_damaged_not_a_crash_later(tmp_path: Path) -> None:
    save = directory(tmp_path, FIRST, 1)
    zoned = receipts.SaveRegistration(
        kind=CHECKPOINT,
        step=1,
        attempt=0,
        incarnation=FIRST.incarnation,
        run_uid="uid",
        participants=(receipts.Participant("model", 0),),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    receipts.write_registration(save, zoned)
    assert receipts.read_registration(save) == zoned
    save.registration.write_text(save.registration.read_text().replace("00Z", "00"))
    with pytest.raises(DamagedFileError, match="timezone"):
        receipts.read_registration(save)
