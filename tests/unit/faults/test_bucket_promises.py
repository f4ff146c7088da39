"""The harness of faults in a bucket can fail: each damage of a bucket's files is noticed."""

import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from trainsync.api.protocol import SaveKind
from trainsync.monitor.ledger.saves import SaveOwner

from tests.faults.in_bucket.listing import StaleListings
from tests.faults.in_bucket.promises import BucketWatch, Reading, check_commits, orphans
from tests.faults.in_bucket.scene import draw_plan
from tests.faults.plan import Plan, Step
from tests.faults.processes import BrokenError

OWNER = SaveOwner(0, "incarnation0")
NEXT = SaveOwner(1, "incarnation1")
POINTER = "latest_checkpointed_iteration.txt"
KIND = SaveKind.CHECKPOINT


@pytest.fixture
def plan() -> Plan:
    return next(p for p in map(draw_plan, range(100)) if len(p.history) > 1 and p.ranks > 1)


@pytest.fixture
def reading(tmp_path: Path, plan: Plan) -> Reading:
    """Two committed steps, as a server has them on its disk."""
    for step in plan.history[:2]:
        commit(tmp_path, plan, step, step.number)
    return Reading(tmp_path)


def commit(root: Path, plan: Plan, step: Step, content: int) -> None:
    """A commit whose weights are those of the step ``content``."""
    files = []
    for component, rank in plan.participants(step, KIND):
        path = f"actor/{component}_world_size_{plan.ranks}_rank_{rank}.pt"
        key = f"objects/global_step_{step.number}/run-0-incarnation0-{component}{rank}/{path}"
        buffer = io.BytesIO()
        torch.save(plan.state(0, content, component, rank), buffer)
        data = buffer.getvalue()
        put(root / key, data)
        digest = f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"
        files.append({"path": path, "key": key, "bytes": len(data), "digest": digest})
    record = {"step": step.number, "attempt": 0, "incarnation": OWNER.incarnation, "files": files}
    name = f"manifests/{KIND}/global_step_{step.number}.json"
    put(root / name, json.dumps(record).encode())
    put(root / POINTER, f"{step.number}\n".encode())


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def check(reading: Reading, plan: Plan, *owners: SaveOwner) -> list[int]:
    steps = {(0, step.number): step for step in plan.history}
    return check_commits(reading, plan, owners or (OWNER,), steps)


def an_object(reading: Reading) -> Path:
    return reading.root / min(reading.manifests()[0].keys)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "said"), [(flip, "torn"), (cut, "torn"), (Path.unlink, "is gone")]
)
def test_an_object_that_is_not_what_its_manifest_says_is_noticed(
    reading: Reading, plan: Plan, spoil: Callable[[Path], None], said: str
) -> None:
    assert check(reading, plan) == [step.number for step in plan.history[:2]]
    spoil(an_object(reading))
    with pytest.raises(BrokenError, match=said):
        check(reading, plan)


def test_weights_of_another_moment_are_noticed_though_all_digests_agree(
    reading: Reading, plan: Plan
) -> None:
    commit(reading.root, plan, plan.history[1], plan.history[0].number)
    with pytest.raises(BrokenError, match="does not hold what attempt 0 had"):
        check(reading, plan)


def test_a_commit_without_the_files_of_a_rank_is_noticed(reading: Reading, plan: Plan) -> None:
    path = reading.root / f"manifests/{KIND}/global_step_{plan.history[0].number}.json"
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps({**record, "files": record["files"][1:]}))
    with pytest.raises(BrokenError, match="lists"):
        check(reading, plan)


def test_what_a_stranger_committed_is_noticed(reading: Reading, plan: Plan) -> None:
    with pytest.raises(BrokenError, match="stranger"):
        check(reading, plan, NEXT)


@pytest.mark.parametrize(
    ("pointer", "said"), [("10\n", "went back"), (None, "is gone"), ("90\n", "no manifest")]
)
def test_a_pointer_that_is_wrong_is_noticed(
    reading: Reading, pointer: str | None, said: str
) -> None:
    watch = BucketWatch(reading)
    watch.look()
    (reading.root / POINTER).unlink()
    if pointer is not None:
        put(reading.root / POINTER, pointer.encode())
    with pytest.raises(BrokenError, match=said):
        watch.look()


def test_what_an_attempt_before_left_is_an_orphan_unless_a_manifest_names_it(
    reading: Reading,
) -> None:
    assert orphans(reading, NEXT) == []
    record = f"run/saves/0-incarnation0/{KIND}/global_step_10/REGISTRATION.json"
    shard = "objects/global_step_30/run-0-incarnation0-w/actor/model.pt"
    own = "objects/global_step_30/run-1-incarnation1-w/actor/model.pt"
    for key in (record, shard, own):
        put(reading.root / key, b"{}")
    assert orphans(reading, NEXT) == [shard, record]


def test_a_save_counts_as_complete_with_all_receipts_and_no_outcome(reading: Reading) -> None:
    folder = reading.root / f"run/saves/0-incarnation0/{KIND}/global_step_30"
    for name in ("REGISTRATION.json", "receipts/model.0.json"):
        put(folder / name, b"{}")
    assert reading.is_complete(OWNER, [("model", 0)], 30)
    assert not reading.is_complete(OWNER, [("model", 0), ("model", 1)], 30)
    put(folder / "OUTCOME.json", b"{}")
    assert not reading.is_complete(OWNER, [("model", 0)], 30)


def entry(key: str) -> bytes:
    return f"<Contents><Key>{key}</Key></Contents>".encode()


def test_a_stale_listing_lacks_what_was_put_and_has_what_was_removed() -> None:
    listings = StaleListings(lag=60.0)
    ask = "/bucket?list-type=2&prefix=a/"
    old = b"<ListBucketResult>" + entry("a/old") + b"</ListBucketResult>"
    assert listings("GET", ask, b"", old) == old
    listings.on = True
    listings("PUT", "/bucket/a/new", b"", b"")
    listings("POST", "/bucket?delete", b"<Key>a/old</Key>", b"")
    now = b"<ListBucketResult>" + entry("a/new") + b"</ListBucketResult>"
    assert listings("GET", ask, b"", now) == old
    assert listings.changed == 1
    listings.lag = 0.01
    end = time.monotonic() + 10
    while listings("GET", ask, b"", now) != now:
        assert time.monotonic() < end, "it is not stale for ever"
