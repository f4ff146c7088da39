"""A rollout's times travel with its batch into the trace of the step that trains on it."""

import pickle
from collections.abc import Callable

from trainsync.tracing import steps
from trainsync.tracing.steps import StepTracer
from trainsync.weights.pacing.messages import Batch
from trainsync.weights.pacing.rollout_trace import RolloutTimes, record_rollout

from tests.unit.tracing.receiver import receiving


def test_a_rollout_is_in_the_trace_of_the_step_that_trains_on_it(
    send_to: Callable[[str], None],
) -> None:
    with receiving() as receiver:
        send_to(receiver.url)
        steps.start({})
        times = RolloutTimes()
        with times.span("rl.reward"):
            pass
        payload = pickle.loads(pickle.dumps(times.added_to("answers")))
        assert payload.payload == "answers"
        record_rollout(StepTracer("a"), 5, Batch("explorer-1", 4, 9, payload))
        assert steps.flush(20)
        ((step, spans),) = receiver.traces().items()
    rollout, reward = sorted(spans, key=lambda span: span.name, reverse=True)
    assert (step, rollout.name, reward.name) == (5, "rl.sample", "rl.reward")
    assert reward.parent == rollout.id
    assert rollout.began <= reward.began <= reward.ended <= rollout.ended
    assert rollout.attributes["trainsync.explorer"] == "explorer-1"
    assert (rollout.attributes["trainsync.batch"], rollout.attributes["trainsync.version"]) == (
        9,
        4,
    )


def test_without_an_endpoint_the_payload_travels_as_it_is() -> None:
    payload = object()
    assert RolloutTimes().added_to(payload) is payload
    record_rollout(StepTracer("a"), 5, Batch("explorer-1", 4, 9, payload))
