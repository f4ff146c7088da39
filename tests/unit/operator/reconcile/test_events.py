"""Events are lost without harm, and not posted when the API server asks to wait."""

from collections.abc import Awaitable, Callable

import pytest
from trainsync_operator.kube.client import ApiError
from trainsync_operator.kube.kinds import EVENT, Kind
from trainsync_operator.reconcile.events import Recorder

from tests.unit.operator.fake_api import FakeApi, events_of
from tests.unit.operator.support import START, make_run

RUN = make_run()
Post = Callable[[Recorder], Awaitable[None]]
POSTS: dict[str, Post] = {
    "transition": lambda recorder: recorder.transition(RUN, "Created", "It begins.", START),
    "problem": lambda recorder: recorder.problem(RUN, "Refused", "No.", START),
    "once": lambda recorder: recorder.once(RUN, "FieldsIgnored", "spec.x", START),
}


def failing(retry_after: float) -> FakeApi:
    def fail(verb: str, kind: Kind, name: str) -> None:
        error = ApiError("API server answered 429: slow down")
        error.retry_after = retry_after
        raise error

    api = FakeApi(lambda: START)
    api.before_write = fail
    return api


@pytest.mark.parametrize("post", POSTS.values(), ids=POSTS)
async def test_an_event_that_is_lost_stops_nothing(post: Post) -> None:
    await post(Recorder(failing(0.0)))


@pytest.mark.parametrize("post", POSTS.values(), ids=POSTS)
async def test_where_the_api_server_asks_to_wait_nothing_goes_on(post: Post) -> None:
    with pytest.raises(ApiError, match="slow down"):
        await post(Recorder(failing(5.0)))


async def test_what_is_told_once_is_told_after_the_wait() -> None:
    api = failing(5.0)
    recorder = Recorder(api)
    with pytest.raises(ApiError):
        await recorder.once(RUN, "FieldsIgnored", "spec.x", START)
    api.before_write = lambda *_: None
    for _ in range(2):
        await recorder.once(RUN, "FieldsIgnored", "spec.x", START)
    assert events_of(api) == ["FieldsIgnored"]
    assert len(api.all(EVENT)) == 1
