"""Which examples hypothesis tries: the same ones each time, or new ones on request; failpoints.

A test that fails for an example drawn by chance would refuse a change that has nothing to do with
it. So a plain run is repeatable, and ``HYPOTHESIS_PROFILE=search`` looks for what nobody has seen,
with ten times as many examples where a test sets no number of its own. Nor does the time that an
example takes decide: on a busy machine any of them may be slow.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from trainsync import failpoints

_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("repeatable", _UNTIMED, derandomize=True)
settings.register_profile("search", _UNTIMED, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _failpoints() -> Iterator[None]:
    """Handlers that a test enabled end with the test."""
    yield
    failpoints.disable_all()
