"""One seed for each use of randomness, so that a resumed step repeats its results."""

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends only on the parts, not on the process.

    Args:
        parts: The use of the randomness, for instance ``(seed, "rollout", step, explorer)``.
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
