"""`SynchronizerHandle` stands in for Ray's handle, and travels with its trainers' number."""

import copy
import pickle
from typing import Any

import pytest
from trainsync.weights.synchronizer.handle import SynchronizerHandle


class Method:
    """Stands in for a method of Ray's handle."""

    def remote(self, *arguments: Any, **more: Any) -> tuple[Any, ...]:
        return (*arguments, more)


class Actor:
    """Stands in for Ray's handle."""

    def __init__(self) -> None:
        self.get_status = "a method"
        self.set_trainer_status = Method()


def test_methods_of_the_actor_are_those_of_its_handle() -> None:
    handle = SynchronizerHandle(Actor(), "ns", 2)
    assert handle.get_status == "a method"
    with pytest.raises(AttributeError):
        _ = handle.no_method_of_it


def test_a_trainers_call_says_for_which_trainers_the_handle_was_made() -> None:
    handle = SynchronizerHandle(Actor(), "ns", 2)
    assert handle.set_trainer_status.remote("stopped") == ("stopped", {"restarts": 2})
    assert handle.set_trainer_status.remote("stopped", restarts=1)[1] == {"restarts": 1}


def test_it_may_be_pickled_and_copied() -> None:
    handle = SynchronizerHandle(Actor(), "ns", 2)
    for again in (pickle.loads(pickle.dumps(handle)), copy.deepcopy(handle)):
        assert (again.namespace, again.restarts, again.get_status) == ("ns", 2, "a method")
