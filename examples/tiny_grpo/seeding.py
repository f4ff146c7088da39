"""One seed for each use of randomness, so that a resumed step repeats what it did before."""

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else (not on the process).

    Args:
        parts: What the randomness is for, for instance ``(seed, "rollout", step, explorer)``.
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
