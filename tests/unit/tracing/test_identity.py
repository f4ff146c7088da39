"""Ids by which all processes of an attempt add to one trace."""

from hypothesis import given
from hypothesis import strategies as st
from trainsync.tracing.identity import span_id, trace_id

WORDS = st.one_of(st.text(max_size=8), st.integers(0, 100))
SPANS = st.tuples(st.text(max_size=8), st.integers(0, 2**63), st.lists(WORDS, max_size=4))


@given(SPANS)
def test_ids_are_those_that_opentelemetry_takes(span: tuple[str, int, list[str | int]]) -> None:
    incarnation, step, key = span
    assert 0 < trace_id(incarnation, step) < 2**128
    assert 0 < span_id(incarnation, step, tuple(key)) < 2**64


@given(st.lists(SPANS, unique_by=str, min_size=2, max_size=6))
def test_other_spans_have_other_ids(spans: list[tuple[str, int, list[str | int]]]) -> None:
    assert len({span_id(i, s, tuple(key)) for i, s, key in spans}) == len(spans)


def test_another_attempt_repeats_a_step_in_a_trace_of_its_own() -> None:
    assert trace_id("aa", 3) == trace_id("aa", 3) != trace_id("bb", 3) != trace_id("bb", 4)
