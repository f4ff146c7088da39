"""What verl, and Trinity-RFT, pass to a checkpoint manager, checked."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.checkpoints.paths import step_and_folder
from trainsync.runtime.context import RunContext

FOLDER = "actor"

_DEPRECATED: Final = "tokenizer"
"""verl takes it for ``processing_class``, and does not show it."""


def folder_of(local_path: str | Path, directory: Path, step: int) -> str:
    """The folder in the step's directory that ``local_path`` names.

    Raises:
        ValueError: it is not ``<run directory>/global_step_N/actor`` of this step.
    """
    named, folder = step_and_folder(local_path, directory)
    if named != step:
        raise ValueError(f"{local_path} is of step {named}, but global_step is {step}")
    if folder != FOLDER:
        # Another model's parts would bear the same names and take the place of these.
        raise ValueError(
            f"{local_path} is in the folder {folder}; expected {FOLDER}: one model of a run can be "
            "saved so far, and a critic cannot"
        )
    return folder


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
