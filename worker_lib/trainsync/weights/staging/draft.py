"""The tensors of a draft model (speculative decoding), which come in its target's version."""

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

DRAFT_PREFIX: Final = "draft."
"""Begins the names of a draft's tensors; the rest is their name in the draft's checkpoint."""

Value = TypeVar("Value")


def has_draft(names: Iterable[str]) -> bool:
    """Whether some tensors are a draft's."""
    return any(name.startswith(DRAFT_PREFIX) for name in names)


def of_target(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Those that are not the draft's."""
    return {name: value for name, value in tensors.items() if not name.startswith(DRAFT_PREFIX)}


def of_draft(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Those of the draft, under the names of its checkpoint."""
    return {
        name.removeprefix(DRAFT_PREFIX): value
        for name, value in tensors.items()
        if name.startswith(DRAFT_PREFIX)
    }
