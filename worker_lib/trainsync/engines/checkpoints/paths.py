"""Where an engine's save lands; pure."""

from pathlib import Path

from trainsync.storage.layout import parse_step, relative_path, step_name


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


def inside_run(local_path: str | Path, directory: Path) -> Path | None:
    """``local_path`` relative to the run's directory; None when it is elsewhere.

    A relative path is taken from the working directory, as verl means it. Links on the way to the
    run's directory are seen through.
    """
    path = Path(local_path).absolute()
    if path.is_relative_to(directory):
        return path.relative_to(directory)
    if path.resolve().is_relative_to(directory.resolve()):
        return path.resolve().relative_to(directory.resolve())
    return None


def step_and_folder(local_path: str | Path, directory: Path) -> tuple[int, str]:
    """(step, folder inside it) of ``<run directory>/global_step_N/<folder>``.

    Raises:
        ValueError: ``local_path`` is anything else.
        UnsafePathError: the folder leaves the step.
    """
    path = inside_run(local_path, directory)
    parts = () if path is None else path.parts
    step = parse_step(parts[0]) if parts else None
    if step is None or len(parts) < 2:
        raise ValueError(
            f"{local_path} is not a place of this run; expected "
            f"{directory}/global_step_N/<folder>, such as {directory}/global_step_1/actor"
        )
    return step, str(relative_path("/".join(parts[1:])))
