"""Which files of tests begin first, where several workers take one file at a time."""

from collections.abc import Sequence
from pathlib import Path

import pytest


def longest_first(items: list[pytest.Item], folder: Path, longest: Sequence[str]) -> None:
    """Move the tests of ``folder`` in the files named ``longest`` before its other tests.

    A long file that begins last would leave the other workers idle.
    """
    rank = {name: place for place, name in enumerate(longest)}
    places = [n for n, item in enumerate(items) if item.path.is_relative_to(folder)]
    sorted_items = sorted(
        (items[n] for n in places), key=lambda item: rank.get(item.path.name, len(rank))
    )
    for place, item in zip(places, sorted_items, strict=True):
        items[place] = item
