"""Tensors in a server's memory, by their digests, beside those that were staged for it.

How a server lays tensors out (fused, sharded, packed) is not known in general. A tensor whose bytes
were once those that were expected has a known layout, and must have the expected bytes from then
on; the others only say whether anything changed.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

_FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Rows of several tensors of a checkpoint, one after the other, in one of vLLM."""
_NAMED: Final = 3  # tensors of a message


def expected_digests(tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, str]:
    """SHA-256 (hex) of a server's tensors, if they lie there as in the checkpoint, or fused.

    Args:
        tensors: full CPU tensors, under the names of the checkpoint.
        names: the server's, as in its checksums: ``dp0:pp0:pcp0:tp0:<name>`` or ``<name>``. Those
            that no tensor is known for are left out.
    """
    wanted: dict[str, list[str]] = {}
    for name in names:
        wanted.setdefault(name.rpartition(":")[2], []).append(name)
    found: dict[str, str] = {}
    for bare, keys in wanted.items():
        parts = _parts(bare, tensors)
        if parts:
            hasher = hashlib.sha256()
            for part in parts:
                data = tensors[part].detach().contiguous().reshape(-1).view(torch.uint8)
                hasher.update(data.numpy().data)
            found |= dict.fromkeys(keys, hasher.hexdigest())
    return found


def _parts(name: str, tensors: Mapping[str, torch.Tensor]) -> Sequence[str]:
    if name in tensors:
        return (name,)
    for fused, parts in _FUSED.items():
        names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
        if names[0] != name and all(part in tensors for part in names):
            return names
    return ()


@dataclass(frozen=True)
class ServerDigests:
    """Knows the digests of a server's tensors after an update.

    Attributes:
        digests: by the server's names.
        known: names of those that had the expected bytes.
        changed: names of those that differed from the version before.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()


def look(
    digests: Mapping[str, str], expected: Mapping[str, str], before: ServerDigests
) -> tuple[ServerDigests, str | None]:
    """The new knowledge, and a sentence if the tensors are not of the new version.

    Args:
        digests: that the server gave.
        expected: of `expected_digests`, with the new version.
        before: of the version that the server had, another one.
    """
    matches = frozenset(name for name, digest in expected.items() if digests.get(name) == digest)
    wrong = sorted(before.known - matches)
    changed = frozenset(
        name for name, digest in digests.items() if before.digests.get(name, digest) != digest
    )
    problem = None
    if wrong:
        same = sum(before.digests[name] == digests.get(name) for name in wrong)
        names = ", ".join(wrong[:_NAMED]) + (", …" if len(wrong) > _NAMED else "")
        problem = f"{len(wrong)} tensors have other bytes than were staged ({names}); " + (
            "all of them are those of the version before"
            if same == len(wrong)
            else f"{same} of them are those of the version before"
        )
    elif before.changed and not changed:
        problem = "no tensor of the server changed with the update"
    return ServerDigests(dict(digests), matches | before.known, changed), problem
