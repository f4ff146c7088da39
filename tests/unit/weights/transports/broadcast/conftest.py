"""A broadcaster with one receiver."""

from collections.abc import Iterator

import pytest

from tests.unit.weights.transports.broadcast.pair import Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.explorer.close()
    pair.trainer.close()
