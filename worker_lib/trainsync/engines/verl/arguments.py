"""What verl, and Trinity-RFT, pass to a checkpoint manager, checked."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.checkpoints.paths import inside_run, step_and_folder
from trainsync.runtime.context import RunContext
from trainsync.storage.layout import INTERNAL

ACTOR: Final = "actor"
CRITIC: Final = "critic"
"""Folders of a step, as verl's trainers name them."""

MERGED: Final = "merged"
"""Folder of a state dict whose LoRA adapter is merged into the weights."""

TRAINER: Final = "trainer"
"""Folder that stands for the trainer's own state, and component of it."""

TOTAL_STEPS: Final = "TRAINSYNC_VERL_TOTAL_STEPS"
"""Environment variable: the run's last step, where the optimizer's number of steps is another."""

_HELD: Final = (INTERNAL, TRAINER)
"""Folders in the run's directory in which verl's trainer writes, while we collect what is saved."""

_DEPRECATED: Final = "tokenizer"
"""verl takes it for ``processing_class``, and does not show it."""


def component_prefix(model: str) -> str:
    """What the names of a model's components begin with; those of the actor are plain."""
    return "" if model == ACTOR else f"{model}_"


def model_of(prefix: str) -> str:
    """The model that a prefix of components is of."""
    return prefix.removesuffix("_") or ACTOR


@dataclass(frozen=True)
class Place:
    """Where verl wants something saved: ``folder`` of a step.

    Attributes:
        held: verl's trainer was given a directory aside, and says when the step is complete.
    """

    folder: str
    held: bool


def held_directory(directory: Path, name: str) -> Path:
    """Where verl's trainer writes instead of ``directory``, the run's; ``name`` is of one save."""
    return directory.joinpath(*_HELD, name)


def place_of(local_path: str | Path, directory: Path, step: int) -> Place:
    """What ``local_path`` names.

    Raises:
        ValueError: it is not ``<run directory>/global_step_N/<folder>`` of this step, nor that in
            a directory of `held_directory`.
    """
    inside = inside_run(local_path, directory)
    held = inside is not None and inside.parts[: len(_HELD)] == _HELD
    if held and inside is not None:
        inside = Path(*inside.parts[len(_HELD) + 1 :])
    named, folder = step_and_folder(directory / inside if inside else local_path, directory)
    if named != step:
        raise ValueError(f"{local_path} is of step {named}, but global_step is {step}")
    return Place(folder, held)


def model_place(local_path: str | Path, directory: Path, step: int, model: str) -> Place:
    """`place_of` a model's save.

    Raises:
        ValueError: also when it is in another model's folder, whose parts it would replace.
    """
    place = place_of(local_path, directory, step)
    if place.folder != model:
        raise ValueError(
            f"{local_path} is in the folder {place.folder}; expected {model}, since this is the "
            f"manager of the {model}"
        )
    return place


def refuse_hdfs(hdfs_path: str | None) -> None:
    """Raises `ValueError` unless it is None."""
    if hdfs_path is not None:
        raise ValueError(
            f"hdfs_path is {hdfs_path!r}; expected None: checkpoints are committed on the run's "
            "volume (unset trainer.default_hdfs_dir)"
        )


def refuse_unknown(method: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises `TypeError`: verl's ``method`` would take one of ``options`` and ignore it."""
    known = {*inspect.signature(method).parameters, _DEPRECATED}
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(
            f"FSDPCheckpointManager takes no {', '.join(unknown)}; expected coordinator, "
            "synchronizer, max_to_keep, ray_namespace, or what verl's manager takes"
        )


def run_of(
    coordinator: CheckpointCoordinator | None, synchronizer: Any, ray_namespace: str | None
) -> tuple[CheckpointCoordinator, Any]:
    """The coordinator and the Synchronizer of a manager.

    Args:
        ray_namespace: as the reference has it, in place of the two others: the run is then the one
            that the environment describes, and this is its attempt's namespace, or empty.

    Raises:
        TypeError: there is neither, or both.
        ValueError: the run's actors live in another namespace.
        What `RunContext.from_env` and `RunContext.synchronizer` raise.
    """
    if ray_namespace is None:
        if coordinator is None:
            raise TypeError(
                "FSDPCheckpointManager has no coordinator; expected coordinator=ctx.coordinator(), "
                "and synchronizer=ctx.synchronizer() where there are explorers"
            )
        return coordinator, synchronizer
    if coordinator is not None or synchronizer is not None:
        raise TypeError(
            f"ray_namespace={ray_namespace!r} is given with coordinator= or synchronizer=, which "
            "say the same; expected the namespace alone, or the two others"
        )
    context = RunContext.from_env()
    try:
        if ray_namespace not in ("", context.ray_namespace):
            raise ValueError(
                f"ray_namespace is {ray_namespace!r}; expected {context.ray_namespace!r}, where "
                "the actors of this attempt are (RunContext.ray_namespace), or coordinator= and "
                "synchronizer="
            )
        return context.coordinator(), context.synchronizer()
    except BaseException:
        context.close()
        raise


def reference_step(hdfs_path: Any, global_step: int, others: bool) -> tuple[str | None, int]:
    """``hdfs_path`` and ``global_step`` of ``save_checkpoint``, whose second argument is the step
    in the reference.

    Args:
        others: whether there are arguments after the step.

    Raises:
        TypeError: a step in the place of ``hdfs_path``, and more that may mean two things.
    """
    if hdfs_path is None or isinstance(hdfs_path, str):
        return hdfs_path, global_step
    if isinstance(hdfs_path, bool) or not isinstance(hdfs_path, int) or global_step or others:
        raise TypeError(
            f"the second argument of save_checkpoint is {hdfs_path!r}; expected "
            "save_checkpoint(local_path, global_step=N, max_ckpt_to_keep=..., save_as_hf=...)"
        )
    return None, hdfs_path


def total_steps() -> int | None:
    """What `TOTAL_STEPS` says; None where it is not set. Raises `ValueError`."""
    given = os.environ.get(TOTAL_STEPS)
    if given is None:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"{TOTAL_STEPS} is {given!r}; expected the number of the last step")
    return int(given)
