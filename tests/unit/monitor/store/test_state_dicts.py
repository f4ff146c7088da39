"""State dicts of a run in a bucket: newer ones supersede older ones, which readers may be at."""

from datetime import timedelta
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind, SaveRequest, SaveState
from trainsync.failpoints import LIVE, STORE, enabled
from trainsync.monitor.errors import FencedError
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.core import StoreCore
from trainsync.storage.objects import commits, keys, repair
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live import references
from trainsync.storage.saves.incarnations import successor

from tests.unit.monitor.store.runs import ONE, TWO, Run, request

CHECKPOINT, STATE_DICT = SaveKind.CHECKPOINT, SaveKind.STATE_DICT
READING = 600.0


class KilledError(Exception):
    """The monitor's process is gone."""


def publish(
    run: Run, core: StoreCore, owner: SaveOwner, step: int, data: bytes = b"bytes", **given: Any
) -> None:
    core.saves.register(owner, request(step, ONE, kind=STATE_DICT))
    writer = f"dict{owner.attempt}{step:03d}"
    run.write(owner, step, ONE, data, writer, kind=STATE_DICT, **given)
    core.tick()


def checkpoint(
    run: Run, core: StoreCore, owner: SaveOwner, step: int, data: bytes = b"bytes"
) -> None:
    core.saves.register(owner, request(step, ONE))
    run.write(owner, step, ONE, data)
    core.tick()


def state(core: StoreCore, owner: SaveOwner, step: int, kind: SaveKind = STATE_DICT) -> SaveState:
    return core.saves.save_status(owner, kind, step).state


def newest(core: StoreCore, owner: SaveOwner) -> int | None:
    found = core.newest(owner, STATE_DICT)
    return None if found is None else found.step


def holder(run: Run, step: int) -> int:
    """The attempt that committed the state dict of the step."""
    return commits.read_manifest(run.bucket, STATE_DICT, step).manifest.attempt


def whole(run: Run) -> None:
    """Every manifest has its objects, and every object a manifest."""
    assert references.named(run.bucket) == set(run.shards())


def resumed(run: Run, attempt: int, **settings: Any) -> tuple[StoreCore, SaveOwner]:
    core, owner = run.monitor(attempt, **settings)
    core.resume(owner)
    return core, owner


def test_a_state_dict_is_committed_with_a_manifest_and_a_pointer_of_its_own() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 5)
    assert state(core, owner, 5) is SaveState.COMMITTED
    assert (run.steps(STATE_DICT), run.steps()) == ([5], [])
    assert commits.read_pointer(run.bucket, STATE_DICT) == 5
    assert commits.read_pointer(run.bucket, CHECKPOINT) is None
    assert newest(core, owner) == 5
    found = core.view().checkpoint.last_state_dict
    assert found is not None
    assert found.step == 5
    assert core.resume(owner) is None, "no attempt resumes from one"
    whole(run)


def test_a_checkpoint_that_reuses_a_state_dict_has_its_files_and_commits_after_it() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    reusing = SaveRequest(
        kind=CHECKPOINT, step=5, participants=request(5, TWO).participants, reuse_state_dict=True
    )
    core.saves.register(owner, reusing)
    run.write(owner, 5, TWO)
    core.tick()
    assert state(core, owner, 5, CHECKPOINT) is SaveState.REGISTERED
    publish(run, core, owner, 5)
    assert state(core, owner, 5, CHECKPOINT) is SaveState.COMMITTED
    weights = commits.read_manifest(run.bucket, STATE_DICT, 5)
    stored = commits.read_manifest(run.bucket, CHECKPOINT, 5)
    assert set(weights.keys.items()) < set(stored.keys.items())
    assert {file.path for file in stored.manifest.files} == {"actor/model_0.pt", "actor/model_1.pt"}


def test_a_newer_attempt_supersedes_what_an_older_one_trained_after_the_checkpoint() -> None:
    run = Run()
    core, owner = resumed(run, 0, reading_seconds=READING)
    checkpoint(run, core, owner, 1)
    for step in (1, 2, 3):
        publish(run, core, owner, step, b"first")
    core, owner = resumed(run, 1, reading_seconds=READING)
    assert newest(core, owner) == 1, "what the attempt resumed from"
    publish(run, core, owner, 2, b"again!")
    assert state(core, owner, 2) is SaveState.COMMITTED
    assert [holder(run, step) for step in (1, 2, 3)] == [0, 1, 0]
    assert newest(core, owner) == 2
    assert commits.read_pointer(run.bucket, STATE_DICT) == 3, "a pointer does not go back"
    publish(run, core, owner, 4)
    assert commits.read_pointer(run.bucket, STATE_DICT) == 4


def test_what_is_superseded_stays_while_a_reader_may_be_at_it_and_no_longer() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 2, b"first")
    old = set(commits.read_manifest(run.bucket, STATE_DICT, 2).keys.values())
    core, owner = resumed(run, 1, reading_seconds=READING)
    publish(run, core, owner, 2, b"again!")
    assert old <= set(run.shards()), "a reader may be at them"
    core.tick()
    run.monotonic.now += READING + 1
    for _ in range(2):
        core.tick()
    assert not old & set(run.shards())
    whole(run)


def test_a_reader_of_an_older_version_has_its_time_and_then_retention_goes_on() -> None:
    run = Run()
    core, owner = resumed(run, 0, max_to_keep=1, reading_seconds=READING)
    for step in (1, 2, 3):
        publish(run, core, owner, step)
    assert run.steps(STATE_DICT) == [1, 2, 3]
    run.now += timedelta(seconds=READING - 1)
    publish(run, core, owner, 4)
    assert run.steps(STATE_DICT) == [1, 2, 3, 4]
    run.now += timedelta(seconds=2)
    core.tick()
    assert run.steps(STATE_DICT) == [3, 4], "3 was the newest one a moment ago"
    # The next monitor knows how long from the manifests alone.
    core, owner = resumed(run, 1, max_to_keep=1, reading_seconds=READING)
    core.tick()
    assert run.steps(STATE_DICT) == [3, 4]
    run.now += timedelta(seconds=READING)
    core.tick()
    assert run.steps(STATE_DICT) == [4]
    whole(run)


def test_retention_of_state_dicts_keeps_checkpoints_and_what_the_attempt_resumed_from() -> None:
    run = Run()
    core, owner = resumed(run, 0, max_to_keep=1, reading_seconds=0.0)
    checkpoint(run, core, owner, 1)
    for step in (1, 2, 3):
        publish(run, core, owner, step)
    assert (run.steps(), run.steps(STATE_DICT)) == ([1], [1, 3])
    core, owner = resumed(run, 1, max_to_keep=1, reading_seconds=0.0)
    checkpoint(run, core, owner, 2)
    assert newest(core, owner) == 1, "of a checkpoint alone explorers have nothing"
    publish(run, core, owner, 2)
    assert (run.steps(), run.steps(STATE_DICT)) == ([2], [2, 3]), "the pointer names 3"


def test_weights_of_an_older_training_are_not_told_of_beside_the_checkpoint_resumed_from() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 2, b"first")
    core, owner = resumed(run, 1)
    checkpoint(run, core, owner, 2, b"again!")
    core, owner = resumed(run, 2)
    assert newest(core, owner) is None
    publish(run, core, owner, 2, b"again!")
    assert newest(core, owner) == 2


def test_the_version_of_the_step_that_is_resumed_from_is_not_saved_again() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 1)
    checkpoint(run, core, owner, 1)
    before = commits.read_manifest(run.bucket, STATE_DICT, 1)
    core, owner = resumed(run, 1)
    status = core.saves.register(owner, request(1, ONE, kind=STATE_DICT))
    assert (status.state, status.manifest_digest) == (SaveState.COMMITTED, before.digest)
    assert core.saves.register(owner, request(2, ONE, kind=STATE_DICT)).state is not status.state


def test_a_restart_in_place_trains_versions_again() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    checkpoint(run, core, owner, 1)
    for step in (1, 2):
        publish(run, core, owner, step, b"first")
    second = SaveOwner(0, successor(owner.incarnation))
    core.renew(owner, second.incarnation, "a rank died")
    core.resume(second)
    assert newest(core, second) == 1
    publish(run, core, second, 2, b"again!")
    assert newest(core, second) == 2
    stored = commits.read_manifest(run.bucket, STATE_DICT, 2).manifest
    assert stored.incarnation == second.incarnation


@pytest.mark.parametrize(
    ("area", "point"),
    [
        (LIVE, "term"),
        (LIVE, "intent"),
        (STORE, "uploaded"),
        (STORE, "superseding"),
        (STORE, "manifest"),
        (STORE, "pointer"),
        (LIVE, "outcome"),
    ],
)
def test_a_monitor_that_dies_amid_superseding_leaves_one_whole_version(
    area: str, point: str
) -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 2, b"first")
    core, owner = resumed(run, 1)
    core.saves.register(owner, request(2, ONE, kind=STATE_DICT))
    run.write(owner, 2, ONE, b"again!", "dict1002", kind=STATE_DICT)

    def die(reached: str) -> None:
        if reached == point:
            raise KilledError

    with enabled(area, die), pytest.raises(KilledError):
        core.tick()
    core, owner = run.monitor(2)
    assert (run.steps(STATE_DICT), holder(run, 2)) == ([2], 1)
    assert commits.read_pointer(run.bucket, STATE_DICT) == 2
    core.tick()
    whole(run)


def test_a_monitor_that_was_deposed_amid_superseding_puts_nothing_late() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 2, b"first")
    old, first = resumed(run, 1)
    old.saves.register(first, request(2, ONE, kind=STATE_DICT))
    run.write(first, 2, ONE, b"again!", "dict1002", kind=STATE_DICT)

    deposed: list[bool] = []

    def depose(reached: str) -> None:
        if reached == "superseding" and not deposed:
            deposed.append(True)
            new, second = resumed(run, 2)  # finishes the intent, and goes on
            publish(run, new, second, 2, b"third...")

    with enabled(STORE, depose):
        old.tick()
    assert deposed
    assert holder(run, 2) == 2
    old.tick()
    with pytest.raises(FencedError):
        old.saves.save_status(first, STATE_DICT, 2)
    assert holder(run, 2) == 2


def test_a_damaged_object_takes_the_state_dict_that_shares_it_along() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    checkpoint(run, core, owner, 1)
    publish(run, core, owner, 1)
    reusing = SaveRequest(
        kind=CHECKPOINT, step=2, participants=request(2, TWO).participants, reuse_state_dict=True
    )
    core.saves.register(owner, reusing)
    run.write(owner, 2, TWO)
    publish(run, core, owner, 2)
    shared = commits.read_manifest(run.bucket, STATE_DICT, 2).keys["actor/model_0.pt"]
    run.bucket.delete([shared])
    core, owner = run.monitor(1)
    point = core.resume(owner)
    assert point is not None
    assert point.step == 1
    assert (run.steps(), run.steps(STATE_DICT)) == ([1], [1])
    assert commits.read_pointer(run.bucket, STATE_DICT) == 1
    assert newest(core, owner) == 1
    publish(run, core, owner, 2)
    assert newest(core, owner) == 2


def test_a_state_dict_that_was_set_aside_is_saved_again() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 2)
    repair.set_aside(run.bucket, commits.read_manifest(run.bucket, STATE_DICT, 2))
    run.bucket.create(keys.manifest(STATE_DICT, 2), b"set aside by trainsync checkpoints repair\n")
    core, owner = resumed(run, 1)
    publish(run, core, owner, 2)
    core.tick()
    assert state(core, owner, 2) is SaveState.COMMITTED


def test_versions_do_not_push_the_outcomes_of_checkpoints_out() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    checkpoint(run, core, owner, 1)
    for step in range(1, 20):
        publish(run, core, owner, step)
    outcome = run.records(owner, 1).outcome()
    assert outcome is not None
    assert run.records(owner, 1, STATE_DICT).outcome() is None


def test_a_monitor_that_keeps_all_finds_the_newest_before_many_that_are_not_superseded_yet() -> (
    None
):
    run = Run()
    core, owner = resumed(run, 0)
    checkpoint(run, core, owner, 1)
    for step in range(2, 80):
        publish(run, core, owner, step)
    core, owner = resumed(run, 1)
    publish(run, core, owner, 2, b"again!")
    core, owner = resumed(run, 1)
    assert newest(core, owner) == 2


@pytest.mark.parametrize("in_place", [False, True])
def test_what_an_attempt_resumed_from_stays_for_readers_that_were_told_of_it(
    in_place: bool,
) -> None:
    run = Run()
    core, owner = resumed(run, 0, max_to_keep=1, reading_seconds=READING)
    publish(run, core, owner, 5)
    checkpoint(run, core, owner, 5)
    for step in (6, 7):
        publish(run, core, owner, step)
    run.now += timedelta(seconds=READING + 300)  # until the trainers are there again
    if in_place:
        second = SaveOwner(0, successor(owner.incarnation))
        core.renew(owner, second.incarnation, "a rank died")
        core.resume(owner := second)
    else:
        core, owner = resumed(run, 1, max_to_keep=1, reading_seconds=READING)
    core.tick()
    assert newest(core, owner) == 5, "a reader begins"
    publish(run, core, owner, 6, b"again!")
    checkpoint(run, core, owner, 6, b"again!")
    run.now += timedelta(seconds=READING - 1)
    core.tick()
    assert 5 in run.steps(STATE_DICT)
    run.now += timedelta(seconds=2)
    core.tick()
    assert 5 not in run.steps(STATE_DICT)


def test_readers_have_their_time_from_the_commit_of_the_next_version_not_from_its_manifests_making(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()
    core, owner = resumed(run, 0, max_to_keep=1, reading_seconds=READING)
    publish(run, core, owner, 1)
    create = run.bucket.create

    def refuse(key: str, data: bytes) -> None:
        if key.startswith("manifests/"):
            raise StoreUnavailableError("503")
        create(key, data)

    monkeypatch.setattr(run.bucket, "create", refuse)
    publish(run, core, owner, 2)
    run.now += timedelta(seconds=READING + 60)
    core.tick()
    assert newest(core, owner) == 1
    monkeypatch.setattr(run.bucket, "create", create)
    run.now += timedelta(seconds=5)
    core.tick()
    core.tick()
    assert newest(core, owner) == 2
    assert run.steps(STATE_DICT) == [1, 2]
    run.now += timedelta(seconds=READING + 1)
    core.tick()
    assert run.steps(STATE_DICT) == [2]
