"""Where an engine's save lands; pure."""

from pathlib import Path

from trainsync.storage.layout import relative_path, step_name


def subdirectory(local_path: str | Path, directory: Path, step: int) -> str:
    """``local_path`` as a folder inside ``global_step_N``.

    Args:
        local_path: as verl passes it, ``<run directory>/global_step_N/actor``; or just ``actor``.
        directory: the run's directory.

    Raises:
        ValueError: an absolute path that is not inside the step's directory.
        UnsafePathError: a relative path that leaves it.
    """
    path = Path(local_path)
    if path.is_absolute():
        step_directory = directory / step_name(step)
        try:
            path = path.relative_to(step_directory)
        except ValueError:
            raise ValueError(
                f"{local_path} is not inside {step_directory}, where step {step} is committed"
            ) from None
    return str(relative_path(str(path)))
