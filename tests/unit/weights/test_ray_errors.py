"""Errors through Ray keep their class, with a message of one sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from trainsync.weights.errors import StaleVersionError, WeightsUnavailableError
from trainsync.weights.ray_errors import one_sentence
from trainsync.weights.synchronizer import connection
from trainsync.weights.synchronizer.connection import SynchronizerConnection

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: Synchronizer
\tpid: 24701
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file."""
TRACE = (
    '\x1b[36mray::Synchronizer.announce()\x1b[39m (pid=1, ip=192.0.2.1)\n  File "x.py", line 3\n'
)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError(DIED), "The actor is dead because its worker process has died"),
        (RuntimeError(f"\x1b[31mno room\x1b[0m\n{TRACE}"), "no room"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_text_of_many_lines_becomes_a_sentence(error: Exception, told: str) -> None:
    assert one_sentence(error) == told


class Raising:
    """A Ray whose every answer is an error."""

    exceptions = ray.exceptions

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get(self, reference: object, timeout: float) -> Any:
        if reference == "contact":
            return SimpleNamespace(kept=False, restarts=0)
        raise self._error


def call(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(connection, "ray", Raising(error))
    method = SimpleNamespace(remote=lambda *_, **__: "answer")
    contact = SimpleNamespace(remote=lambda: "contact")
    handle = SimpleNamespace(announce=method, get_contact=contact)
    return SynchronizerConnection(handle, 1.0).call("announce", timeout=1.0)


def of_task(cause: Exception) -> Exception:
    made = ray.exceptions.RayTaskError("announce", TRACE + str(cause), cause)
    error: Exception = made.as_instanceof_cause()
    return error


def test_what_the_synchronizer_raises_arrives_as_it_was_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(StaleVersionError) as stale:
        call(of_task(StaleVersionError("version 2 is already published")), monkeypatch)
    assert str(stale.value) == "version 2 is already published"
    assert not isinstance(stale.value, ray.exceptions.RayError)
    assert stale.value.__suppress_context__
    unforeseen = of_task(KeyError("w"))
    with pytest.raises(KeyError) as other:
        call(unforeseen, monkeypatch)
    assert other.value.__cause__ is unforeseen, "it says where that was"


def test_a_synchronizer_that_is_gone_is_told_of_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(WeightsUnavailableError, match=r"^the Synchronizer is gone: The actor") as e:
        call(ray.exceptions.RayActorError(), monkeypatch)
    assert "\n" not in str(e.value)
