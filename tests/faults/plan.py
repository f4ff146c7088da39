"""The steps and saves of one trial, drawn from its seed."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from trainsync.api.protocol import SaveKind
from trainsync.api.spec import Verify
from trainsync.checkpoint.save.registration import all_ranks

COMPONENTS = ("model", "optim", "extra")
STRIDE = 10
FROZEN_ELEMENTS = 70_000
"""Elements of a state that does not change: more than a block of digests."""


class Way(StrEnum):
    """A way to save a component of a step."""

    COPIED = "copied"
    OVERLAPPED = "overlapped"
    FUNCTION = "function"
    FAILING = "failing"
    """A function that raises."""


class Shape(StrEnum):
    """The kinds of saves of a step."""

    CHECKPOINT = "checkpoint"
    STATE_DICT = "state_dict"
    REUSE = "checkpoint_reusing_state_dict"

    @property
    def kinds(self) -> tuple[SaveKind, ...]:
        """The saves of a step of this shape."""
        if self is Shape.CHECKPOINT:
            return (SaveKind.CHECKPOINT,)
        if self is Shape.STATE_DICT:
            return (SaveKind.STATE_DICT,)
        return (SaveKind.STATE_DICT, SaveKind.CHECKPOINT)


@dataclass(frozen=True)
class Step:
    """A step that is saved."""

    number: int
    shape: Shape


@dataclass(frozen=True)
class Plan:
    """One trial's job: ``history`` is committed before the fault strikes at ``fault``."""

    seed: int
    ranks: int
    components: tuple[str, ...]
    largest: int
    keep: int | None
    verify: Verify
    history: tuple[Step, ...]
    fault: Step
    register_first: bool
    split: bool
    """Whether the monitor and some ranks are in another process than the one with the fault."""
    failing: int | None = None
    """A step whose last component cannot be saved, so that the save is aborted."""
    least: int = 0
    """Elements that every state has at least."""
    frozen: tuple[str, ...] = ()
    """Components whose states are the same in all steps and attempts; with some, saves are
    incremental, and half of the other states have a tensor that is."""

    def keeping(self, keep: int | None) -> "Plan":
        """This plan with another number of steps to keep."""
        return replace(self, keep=keep)

    def without_history(self) -> "Plan":
        """This plan for a process that starts after the fault."""
        return replace(self, history=())

    @property
    def after(self) -> Step:
        """The step that the same attempt saves after the fault."""
        return Step(self.fault.number + STRIDE, Shape.CHECKPOINT)

    def participants(self, step: Step, kind: SaveKind) -> list[tuple[str, int]]:
        """(component, rank) of every participant of this save."""
        return all_ranks(*self.written(step, kind), world_size=self.ranks)

    def written(self, step: Step, kind: SaveKind) -> tuple[str, ...]:
        """Components that each rank writes to this save."""
        if kind is SaveKind.STATE_DICT:
            return self.components[:1]
        return self.components[1:] if step.shape is Shape.REUSE else self.components

    def files(self, kind: SaveKind, step: Step) -> set[str]:
        """The files that the manifest must list."""
        components = self.written(step, kind)
        if step.shape is Shape.REUSE and kind is SaveKind.CHECKPOINT:
            components = self.components
        return {
            f"actor/{name}_world_size_{self.ranks}_rank_{rank}.pt"
            for name in components
            for rank in range(self.ranks)
        }

    def way(self, step: Step, component: str) -> Way:
        """The way in which each rank saves this component of this step."""
        if step.number == self.failing and component == self.components[-1]:
            return Way.FAILING
        ways = (Way.COPIED, Way.OVERLAPPED, Way.FUNCTION)
        return random.Random(f"way {self.seed} {step.number} {component}").choice(ways)

    def state(self, attempt: int, step: int, component: str, rank: int) -> dict[str, Any]:
        """The state of a rank's component; every byte depends on rank and component, and on the
        step unless the component is frozen, or a tensor of it is."""
        if component in self.frozen:
            attempt = step = 0
        dice = random.Random(f"{self.seed} {attempt} {step} {component} {rank}")
        size = dice.choice((0, 1, dice.randrange(1, 500), dice.randrange(1, self.largest + 1)))
        size = max(size, self.least, FROZEN_ELEMENTS if component in self.frozen else 0)
        state: dict[str, Any] = {"whose": [attempt, step, rank], "component": component}
        always = random.Random(f"{self.seed} {component} {rank}")
        if self.frozen and component not in self.frozen and always.random() < 0.5:
            size = max(always.randrange(1, self.largest + 1), self.least)  # files of one size
            still = torch.full((4 * FROZEN_ELEMENTS,), always.random(), dtype=torch.float32)
            state["still"] = still
        return state | {"weights": torch.full((size,), dice.random(), dtype=torch.float32)}


def same(first: Any, second: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    return (
        isinstance(first, dict)
        and isinstance(second, dict)
        and first.keys() == second.keys()
        and first["whose"] == second["whose"]
        and first["component"] == second["component"]
        and all(
            torch.equal(first[name], second[name]) for name in ("still", "weights") if name in first
        )
    )


def draw(
    seed: int,
    *,
    shape: Shape | None = None,
    split: bool | None = None,
    least_ranks: int = 1,
    least_history: int = 0,
    largest: int | None = None,
) -> Plan:
    """A plan; parameters that are not given are drawn."""
    dice = random.Random(f"plan {seed}")
    shape = shape or dice.choice(list(Shape))
    least_components = 2 if shape is Shape.REUSE else 1
    components = COMPONENTS[: dice.randint(least_components, 3)]
    shapes = [s for s in Shape if len(components) > 1 or s is not Shape.REUSE]
    past = dice.randint(least_history, 3)
    history = tuple(Step(STRIDE * (i + 1), dice.choice(shapes)) for i in range(past))
    return Plan(
        seed=seed,
        ranks=dice.randint(least_ranks, 4),
        components=components,
        largest=largest or dice.choice((100, 2_000, 25_000)),
        keep=dice.choice((None, 1, 1, 2, 3)),
        verify=dice.choice(list(Verify)),
        history=history,
        fault=Step(STRIDE * (past + 1), shape),
        register_first=dice.random() < 0.5,
        split=dice.random() < 0.5 if split is None else split,
    )
