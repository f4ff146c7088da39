"""Which examples hypothesis tries: the same ones each time, or new ones on request; failpoints;
and what lets tests cost less processor.

A failure for a random example would block an unrelated change. So a plain run is repeatable, and
``HYPOTHESIS_PROFILE=search`` tries new examples, ten times as many in tests that set no number.
Examples have no deadline, since any example may be slow on a busy machine.
"""

import atexit
import functools
import gc
import os
from collections.abc import Generator, Iterator

import httpx
import pytest
from hypothesis import HealthCheck, settings
from trainsync import failpoints

_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("repeatable", _UNTIMED, derandomize=True)
settings.register_profile("search", _UNTIMED, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# By default a thread of OpenMP keeps its core busy for some 10 ms after each operation of torch.
# Read when torch is imported, which is later, and by the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    """A worker of xdist ends without taking all of torch apart, which takes four seconds."""
    if hasattr(config, "workerinput"):
        atexit.register(_end, os.getpid())


def _end(worker: int) -> None:
    if os.getpid() == worker:  # and is not what a test forked
        os._exit(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests, which live to the end, out of each collection of garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else triton says at the end that all of it has leaked
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _authorities() -> Iterator[None]:
    """All clients of httpx share one list of certificate authorities.

    To read it takes 20 ms, and each ``httpx.get`` makes a client: a test that asks a server until
    its answer changes did little else.
    """
    once = functools.cache(httpx.create_ssl_context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", once)
        yield


@pytest.fixture(autouse=True)
def _failpoints() -> Iterator[None]:
    """Handlers that a test enabled end with the test."""
    yield
    failpoints.disable_all()
