"""The ids of a step's trace and of its spans; pure.

Processes of an attempt share its incarnation, a random name. Ids are digests of it: ranks, driver
and explorers record spans of one trace, under one root, with no message between them.
"""

from hashlib import blake2b

Key = tuple[str | int, ...]
"""Names a span of a step that other spans lie under; ``()`` is the step itself."""


def trace_id(incarnation: str, step: int) -> int:
    """128 bits, as evenly spread as random ones: samplers choose traces by them."""
    return _digest(16, incarnation, int(step))


def span_id(incarnation: str, step: int, key: Key = ()) -> int:
    """64 bits."""
    return _digest(8, incarnation, int(step), *key)


def _digest(size: int, *words: str | int) -> int:
    text = "\0".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest(), "big") or 1
