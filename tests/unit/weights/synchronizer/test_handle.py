"""`SynchronizerHandle` stands in for Ray's handle, and travels with its trainers' number."""

import copy
import pickle

import pytest
from trainsync.weights.synchronizer.handle import SynchronizerHandle


class Actor:
    """Stands in for Ray's handle."""

    def __init__(self) -> None:
        self.get_status = "a method"


def test_methods_of_the_actor_are_those_of_its_handle() -> None:
    handle = SynchronizerHandle(Actor(), "ns", 2)
    assert handle.get_status == "a method"
    with pytest.raises(AttributeError):
        _ = handle.no_method_of_it


def test_it_may_be_pickled_and_copied() -> None:
    handle = SynchronizerHandle(Actor(), "ns", 2)
    for again in (pickle.loads(pickle.dumps(handle)), copy.deepcopy(handle)):
        assert (again.namespace, again.restarts, again.get_status) == ("ns", 2, "a method")
