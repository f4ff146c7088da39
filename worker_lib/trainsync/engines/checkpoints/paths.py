"""Where an engine's save lands; pure."""

from collections.abc import Callable
from pathlib import Path

from trainsync.storage.layout import parse_step, relative_path, step_name


def subdirectory(local_path: str | Path, run: Callable[[], Path], step: int) -> str:
    """``local_path`` as a folder inside ``global_step_N``.

    Args:
        local_path: as verl passes it, ``<run directory>/global_step_N/actor``, where a relative
            path begins in the working directory; or one name, such as ``actor``.
        run: gives the run's directory; asked where the path is more than a name.

    Raises:
        What ``run`` raises.
        ValueError: it is neither, or of another step; names both places.
        UnsafePathError: the folder leaves the step.
    """
    path = Path(local_path)
    if len(path.parts) == 1 and not path.is_absolute():
        return str(relative_path(str(path)))
    directory = run()
    inside = inside_run(path, directory)
    if inside is None or len(inside.parts) < 2 or inside.parts[0] != step_name(step):
        raise ValueError(
            f"local_path is {str(local_path)!r} (that is {path.absolute()}); expected a folder in "
            f"{directory / step_name(step)}, the place of step {step}, or one folder's name, such "
            "as actor"
        )
    return str(relative_path("/".join(inside.parts[1:])))


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
