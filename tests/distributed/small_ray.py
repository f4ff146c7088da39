"""Rays that start without what no test asks for."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ray._private.node import Node


@contextmanager
def without_dashboard() -> Iterator[None]:
    """A Ray that starts within has no process of the dashboard's, which ``include_dashboard=False``
    leaves: a second of processor, for statistics of usage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "start_api_server", lambda *_, **__: None)
        yield
