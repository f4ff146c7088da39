"""The chain of agents, whoever knows of whom."""

from hypothesis import given
from hypothesis import strategies as st
from trainsync.agent.fellows.order import MOST_TRIED, sources
from trainsync.api.protocol import Fellow

_NAMES = st.sets(st.text("abc-0", min_size=1, max_size=6), min_size=1, max_size=12)


def _fellows(names: set[str], me: str) -> list[Fellow]:
    return [Fellow(name=name, address="10.0.0.1:1") for name in names if name != me]


@given(_NAMES)
def test_each_takes_from_the_one_before_and_the_first_alone_from_the_volume(
    names: set[str],
) -> None:
    chain = sorted(names)
    for place, me in enumerate(chain):
        found = [fellow.name for fellow in sources(me, _fellows(names, me))]
        assert found == chain[max(0, place - MOST_TRIED) : place][::-1]


@given(_NAMES, st.data())
def test_no_agents_wait_for_one_another_also_where_each_knows_others(
    names: set[str], data: st.DataObject
) -> None:
    waits_for = {
        me: [
            fellow.name
            for fellow in sources(
                me, _fellows(data.draw(st.sets(st.sampled_from(sorted(names)))), me)
            )
        ]
        for me in names
    }
    free = {me for me in names if not waits_for[me]}
    while grown := {me for me in names - free if set(waits_for[me]) <= free}:
        free |= grown
    assert free == names
