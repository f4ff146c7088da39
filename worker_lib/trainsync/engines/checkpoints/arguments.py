"""Checks the arguments that verl and Trinity-RFT pass to a checkpoint manager."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.checkpoints.paths import inside_run, split
from trainsync.runtime.context import RunContext
from trainsync.storage.layout import INTERNAL

ACTOR: Final = "actor"
CRITIC: Final = "critic"
"""Folders of a step, as verl's trainers name them."""

MERGED: Final = "merged"
"""Folder of a state dict whose LoRA adapter is merged into the weights."""

TRAINER: Final = "trainer"
"""Folder of the trainer's own state, and the name of its component."""

TOTAL_STEPS: Final = "TRAINSYNC_VERL_TOTAL_STEPS"
"""Environment variable: the run's last step, where the optimizer counts other steps."""

_HELD: Final = (INTERNAL, TRAINER)
"""Folders of the run for files of verl's trainer, until a commit collects them; see
`held_directory`."""

_DEPRECATED: Final = "tokenizer"
"""verl's undocumented old name of ``processing_class``."""


def component_prefix(model: str) -> str:
    """Prefix of the names of a model's components; empty for the actor."""
    return "" if model == ACTOR else f"{model}_"


def model_of(prefix: str) -> str:
    """The model of a component prefix."""
    return prefix.removesuffix("_") or ACTOR


@dataclass(frozen=True)
class SaveTarget:
    """The target of a save in verl: ``folder`` of a step.

    Attributes:
        held: verl's trainer writes into a directory of `held_directory` and signals when the step
            is complete.
    """

    folder: str
    held: bool


def held_directory(directory: Path, name: str) -> Path:
    """Directory of verl's trainer for the save ``name``, in place of the run's ``directory``; of a
    run in a store, of a local directory whose path ends with the store's URL."""
    return directory.joinpath(*_HELD, name)


def place_of(local_path: str | Path, run: Path | str, step: int) -> SaveTarget:
    """The step and folder that ``local_path`` names.

    Args:
        run: its directory, or the URL of its store.

    Raises:
        ValueError: the path is neither ``<run>/global_step_N/<folder>`` of this step nor such a
            path in a directory of `held_directory`.
    """
    inside = inside_run(local_path, run)
    held = inside is not None and inside.parts[: len(_HELD)] == _HELD
    if held and inside is not None:
        inside = Path(*inside.parts[len(_HELD) + 1 :])
    named, folder = split(inside, local_path, run)
    if named != step:
        raise ValueError(f"{local_path} is of step {named}, but global_step is {step}")
    return SaveTarget(folder, held)


def model_place(local_path: str | Path, run: Path | str, step: int, model: str) -> SaveTarget:
    """`place_of` for a model's save.

    Raises:
        ValueError: as `place_of`; or the path is in another model's folder, whose parts the save
            would replace.
    """
    place = place_of(local_path, run, step)
    if place.folder != model:
        raise ValueError(
            f"{local_path} is in the folder {place.folder}; expected {model}, since this is the "
            f"manager of the {model}"
        )
    return place


def refuse_hdfs(hdfs_path: str | None) -> None:
    """Raises `ValueError` unless ``hdfs_path`` is None."""
    if hdfs_path is not None:
        raise ValueError(
            f"hdfs_path is {hdfs_path!r}; expected None: checkpoints are committed on the run's "
            "volume, or in its bucket (unset trainer.default_hdfs_dir)"
        )


def refuse_unknown(method: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises `TypeError` for ``options``: verl's ``method`` would accept and ignore them."""
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
        ray_namespace: as in the reference, in place of the other two arguments: the environment
            describes the run, and this is the namespace of its attempt, or empty.

    Raises:
        TypeError: neither or both are given.
        ValueError: the run's actors live in another namespace.
        The errors of `RunContext.from_env` and `RunContext.synchronizer`.
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
    """``hdfs_path`` and ``global_step`` of ``save_checkpoint``; in the reference the step is the
    second argument.

    Args:
        others: whether there are arguments after the step.

    Raises:
        TypeError: a step in the place of ``hdfs_path``, followed by ambiguous arguments.
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
    """The value of `TOTAL_STEPS`; None if not set. Raises `ValueError`."""
    given = os.environ.get(TOTAL_STEPS)
    if given is None:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"{TOTAL_STEPS} is {given!r}; expected the number of the last step")
    return int(given)
