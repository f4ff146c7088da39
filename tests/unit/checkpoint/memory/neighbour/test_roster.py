"""Copies go to another node where there is one, and each node takes those of one other."""

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from trainsync.checkpoint.memory.neighbour import roster
from trainsync.checkpoint.memory.neighbour.roster import CopyHolder
from trainsync.storage.layout import RunDirectory

INCARNATION = "0123456789abcdef"


def holder(node: str, host: str, rank: int, domain: str = "") -> CopyHolder:
    return CopyHolder(
        id=f"{rank:08d}",
        node=node,
        host=host,
        address="127.0.0.1",
        port=1000 + rank,
        rank=rank,
        domain=domain,
    )


@st.composite
def trainers(draw: st.DrawFn) -> list[CopyHolder]:
    nodes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))  # pods of each
    ranks = draw(st.integers(1, 4))  # of each pod
    places = [
        (f"n{node}", f"n{node}p{pod}") for node, pods in enumerate(nodes) for pod in range(pods)
    ]
    every = [place for place in places for _ in range(ranks)]
    return [holder(*place, rank) for rank, place in enumerate(every)]


@given(trainers())
def test_a_copy_goes_to_another_node_or_else_to_another_pod(holders: list[CopyHolder]) -> None:
    nodes = {one.node for one in holders}
    pods = {one.host for one in holders}
    for own in holders:
        found = roster.partners(holders, own)
        if len(nodes) > 1:
            assert {one.node for one in found}.isdisjoint({own.node})
        else:
            assert {one.host for one in found}.isdisjoint({own.host})
        assert bool(found) is (len(pods) > 1)


@given(trainers())
def test_each_node_takes_those_of_one_other(holders: list[CopyHolder]) -> None:
    nodes = {one.node for one in holders}
    if len(nodes) == 1:
        return
    takes = {own.node: {one.node for one in roster.partners(holders, own)} for own in holders}
    assert all(len(found) == 1 for found in takes.values())
    assert {next(iter(found)) for found in takes.values()} == nodes


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(1, 3), st.randoms())
def test_a_copy_goes_to_another_failure_domain_if_none_has_more_than_half_of_the_nodes(
    sizes: list[int], ranks: int, draws: random.Random
) -> None:
    domains = [f"zone-{number}" for number, size in enumerate(sizes) for _ in range(size)]
    draws.shuffle(domains)  # names of nodes say nothing of their zones
    holders = [
        holder(f"n{node}", f"p{node}", node * ranks + rank, domain)
        for node, domain in enumerate(domains)
        for rank in range(ranks)
    ]
    takes = {}
    apart = 0
    for own in holders:
        found = roster.partners(holders, own)
        assert {one.node for one in found}.isdisjoint({own.node})
        takes[own.node] = {one.node for one in found}
        apart += found[0].domain != own.domain
    assert all(len(found) == 1 for found in takes.values())
    assert {next(iter(found)) for found in takes.values()} == set(takes), "one takes two"
    most = max(sizes)
    together = max(0, 2 * most - len(domains))  # nodes for which no other domain is left
    assert apart == (len(domains) - together) * ranks


def test_processes_of_one_node_that_name_different_domains_are_not_partners() -> None:
    holders = [
        holder("n0", "p0", 0, "a"),
        holder("n0", "p1", 1, "b"),
        holder("n1", "p2", 2, "b"),
    ]
    assert [one.node for one in roster.partners(holders, holders[0])] == ["n1"]
    assert {one.node for one in roster.partners(holders, holders[2])} == {"n0"}


def test_the_ranks_of_a_node_choose_different_processes_of_the_next_one() -> None:
    holders = [holder(f"n{rank // 4}", f"p{rank // 4}", rank) for rank in range(8)]
    first = [roster.partners(holders, own)[0].rank for own in holders]
    assert first == [4, 5, 6, 7, 0, 1, 2, 3]


def test_a_process_that_is_known_is_not_read_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    one, other = holder("a", "p", 0), holder("b", "q", 1)
    roster.enter(run, 0, INCARNATION, one)
    known: dict[str, CopyHolder] = {}
    assert roster.read(run, 0, INCARNATION, known) == [one]
    for path in run.copy_holders(0, INCARNATION).iterdir():
        path.write_bytes(b"")
    roster.enter(run, 0, INCARNATION, other)
    assert {each.id for each in roster.read(run, 0, INCARNATION, known)} == {one.id, other.id}


def test_processes_of_the_attempt_are_found_and_those_of_another_are_not(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert roster.read(run, 1, INCARNATION) == []
    mine = holder("n0", "p0", 0)
    roster.enter(run, 1, INCARNATION, mine)
    roster.enter(run, 0, INCARNATION, holder("n1", "p1", 1))
    (run.copy_holders(1, INCARNATION) / "torn.json").write_text('{"id": "0')
    assert roster.read(run, 1, INCARNATION) == [mine]
