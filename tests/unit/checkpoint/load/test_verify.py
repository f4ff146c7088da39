"""The rank that checks each file of a checkpoint that ranks load together."""

from trainsync.checkpoint.load.verify import Need, assign


def test_a_file_is_checked_once_on_each_host_that_needs_it() -> None:
    needs = [
        Need("a", frozenset({"0", "1"})),
        Need("a", frozenset({"1", "2"})),
        Need("b", frozenset({"1"})),
    ]
    work = assign(needs, {"0": 5, "1": 5, "2": 5})
    assert sorted(work[0] + work[1]) == ["0", "1", "2"]
    assert work[2] == ["1"]


def test_no_rank_checks_unneeded_files_and_the_work_is_even() -> None:
    needs = [Need("a", frozenset(map(str, range(12)))) for _ in range(3)]
    work = assign(needs, {str(number): 10 for number in range(12)})
    assert [len(paths) for paths in work] == [4, 4, 4]
    own = [Need("a", frozenset({f"{rank}"})) for rank in range(4)]
    assert assign(own, {str(rank): rank for rank in range(4)}) == [["0"], ["1"], ["2"], ["3"]]
