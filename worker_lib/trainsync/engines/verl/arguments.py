"""What verl passes to a checkpoint manager, checked; pure."""

from pathlib import Path

from trainsync.engines.checkpoints.paths import step_and_folder

FOLDER = "actor"


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
