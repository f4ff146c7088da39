"""Fixtures of all unit tests."""

from collections.abc import Iterator

import pytest
from trainsync.checkpoint.save import ending
from trainsync.checkpoint.save.watch import SaveWatch


@pytest.fixture(autouse=True)
def _watches_of_saves() -> Iterator[None]:
    """A watch of saves that a test began ends with the test.

    It would look for their outcomes, and write warnings into the output of later tests.
    """
    before = set(ending._known)
    yield
    for owner in set(ending._known) - before:
        if isinstance(owner, SaveWatch):
            owner.close(0)
