"""Combinations of verl and torch versions, and the tests run with them; pure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent

TESTS: Final = (
    "tests/unit/engines",
    "tests/unit/integrations",
    "tests/unit/checkpoint",
    "tests/distributed/checkpoint/test_checkpoint_fsdp.py",
    "tests/distributed/engines",
    "tests/distributed/checkpoint/test_merging_fsdp.py",
    "tests/distributed/weights/test_publisher.py",
    "tests/distributed/checkpoint/test_resume_*.py",
    "tests/distributed/verl",
)
"""Files, folders and patterns of tests that use torch's sharding, verl or Megatron."""


@dataclass(frozen=True)
class Combination:
    """One version of verl with one of torch.

    Attributes:
        verl, torch: exact versions.
        relaxed: requirements that replace verl's own.
        locked: the combination is the one of ``uv.lock``, whose environment exists.
    """

    verl: str
    torch: str
    relaxed: tuple[str, ...] = ()
    locked: bool = False

    @property
    def name(self) -> str:
        """Such as ``verl-0.8-torch-2.11``."""
        return f"verl-{_series(self.verl)}-torch-{_series(self.torch)}"

    @property
    def lock(self) -> Path:
        """Every package of its environment, with its exact version."""
        return FOLDER / f"{self.name}.txt"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Requirements that override ``pyproject.toml``."""
        return (f"verl=={self.verl}", f"torch=={self.torch}", *self.relaxed)


# verl 0.8 declares numpy < 2, but its dependency pyarrow is built for numpy 2.
_NUMPY_2: Final = ("numpy>=2",)

ALL: Final = (
    Combination("0.8.0", "2.11.0", relaxed=_NUMPY_2),
    Combination("0.8.0", "2.15.0", relaxed=_NUMPY_2),
    Combination("0.9.1", "2.11.0"),
    Combination("0.9.1", "2.15.0", locked=True),
)


def chosen(words: list[str]) -> list[Combination]:
    """Combinations with one of ``words`` in the name; all without words.

    Raises:
        ValueError: a word is in no name; lists the names.
    """
    for word in words:
        if not any(word in combination.name for combination in ALL):
            names = ", ".join(combination.name for combination in ALL)
            raise ValueError(f"no combination has {word!r} in its name; there are: {names}")
    return [one for one in ALL if not words or any(word in one.name for word in words)]


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])
