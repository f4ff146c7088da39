"""Which files in memory are dropped: never one that a load may need, and all others."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from trainsync.checkpoint.memory.decision import to_drop, to_spare
from trainsync.checkpoint.memory.place import KeptName

DIGEST = "xxh3-128:" + "0" * 32
OWN = "0123456789abcdef"
OTHER = "fedcba9876543210"

steps = st.integers(0, 6)
files = st.lists(
    st.builds(
        KeptName,
        name=st.text("abcdef", min_size=1, max_size=3),
        step=steps,
        attempt=st.integers(0, 3),
        incarnation=st.sampled_from([OWN, OTHER]),
        digest=st.sampled_from([None, DIGEST]),
        part=st.sampled_from(["model-0", "model-1"]),
    ),
    max_size=20,
    unique_by=lambda kept: kept.name,
)
spare_files = files.map(
    lambda kept: [replace(one, is_spare=one.digest is None and one.step % 2 == 0) for one in kept]
)
newest_steps = st.none() | steps


@given(files, newest_steps, st.frozensets(steps))
def test_whole_files_of_the_newest_commit_stay(
    kept: list[KeptName], newest: int | None, aborted: frozenset[int]
) -> None:
    dropped = to_drop(kept, attempt=1, incarnation=OWN, newest=newest, aborted=aborted)
    assert not [file for file in dropped if file.step == newest and file.digest is not None]


@given(files, newest_steps, st.frozensets(steps))
def test_nothing_of_a_later_attempt_is_touched(
    kept: list[KeptName], newest: int | None, aborted: frozenset[int]
) -> None:
    dropped = to_drop(kept, attempt=1, incarnation=OWN, newest=newest, aborted=aborted)
    assert all(file.attempt <= 1 for file in dropped)


@given(files, newest_steps, st.frozensets(steps))
def test_what_may_still_commit_stays_and_the_rest_goes(
    kept: list[KeptName], newest: int | None, aborted: frozenset[int]
) -> None:
    mine = [replace(file, attempt=1) for file in kept]
    dropped = to_drop(mine, attempt=1, incarnation=OWN, newest=newest, aborted=aborted)
    for file in mine:
        whole = file.step == newest and file.digest is not None
        in_flight = file.incarnation == OWN and file.step not in aborted
        in_flight = in_flight and (newest is None or file.step >= newest)
        assert (file in dropped) is not (whole or in_flight)


def test_a_process_that_starts_again_keeps_what_it_resumes_from_and_nothing_in_flight() -> None:
    def file(step: int, whole: bool) -> KeptName:
        return KeptName(f"{step}-{whole}", step, 0, OTHER, DIGEST if whole else None, "model-0")

    kept = [file(4, True), file(5, True), file(6, True), file(7, False)]
    dropped = to_drop(kept, attempt=1, incarnation=OWN, newest=5)
    assert [one.step for one in dropped] == [4, 6, 7]


@given(spare_files, newest_steps, st.frozensets(steps))
def test_one_dropped_file_of_each_part_that_saves_on_is_spare(
    kept: list[KeptName], newest: int | None, aborted: frozenset[int]
) -> None:
    mine = [replace(file, attempt=1) if file.incarnation == OWN else file for file in kept]
    dropped = to_drop(mine, attempt=1, incarnation=OWN, newest=newest, aborted=aborted)
    spares = to_spare(mine, dropped, attempt=1, incarnation=OWN)
    stays = [file for file in mine if file not in dropped]
    assert spares <= set(dropped)
    for part in ("model-0", "model-1"):
        own = [file for file in dropped if file.part == part and file.incarnation == OWN]
        usable = [file for file in own if file.is_spare or file.digest is not None]
        saves_on = any(file.part == part and file.incarnation == OWN for file in stays)
        chosen = [file for file in spares if file.part == part]
        assert len(chosen) == (1 if usable and saves_on else 0)
        # Else a part had another spare file with each save.
        if any(file.is_spare for file in usable):
            assert all(file.is_spare for file in chosen)


@given(spare_files, newest_steps)
def test_a_spare_file_is_nothing_that_a_load_needs(
    kept: list[KeptName], newest: int | None
) -> None:
    dropped = to_drop(kept, attempt=1, incarnation=OWN, newest=newest)
    assert all(file in dropped for file in kept if file.is_spare and file.attempt <= 1)
