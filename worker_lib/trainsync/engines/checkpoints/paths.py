"""Where an engine's save lands; pure.

A run is its directory, or the URL of its store. verl makes a path of a URL, with one slash after
the scheme, and puts a directory before it: what follows the URL counts.
"""

from collections.abc import Callable
from pathlib import Path

from trainsync.storage.layout import parse_step, relative_path, step_name
from trainsync.storage.objects.address import is_url, parse


def subdirectory(local_path: str | Path, run: Callable[[], Path | str], step: int) -> str:
    """``local_path`` as a folder inside ``global_step_N``.

    Args:
        local_path: as verl passes it, ``<run>/global_step_N/actor``, where a relative path begins
            in the working directory; or one name, such as ``actor``.
        run: gives the run's directory, or the URL of its store; asked where the path is more than
            a name.

    Raises:
        What ``run`` raises.
        ValueError: it is neither, or of another step; names both places.
        UnsafePathError: the folder leaves the step.
    """
    path = Path(local_path)
    if len(path.parts) == 1 and not path.is_absolute():
        return str(relative_path(str(path)))
    where = run()
    inside = inside_run(local_path, where)
    if inside is None or len(inside.parts) < 2 or inside.parts[0] != step_name(step):
        found = "" if is_url(str(local_path)) else f" (that is {path.absolute()})"
        raise ValueError(
            f"local_path is {str(local_path)!r}{found}; expected a folder in "
            f"{where}/{step_name(step)}, the place of step {step}, or one folder's name, such "
            "as actor"
        )
    return str(relative_path("/".join(inside.parts[1:])))


def inside_run(local_path: str | Path, run: Path | str) -> Path | None:
    """``local_path`` relative to the run; None when it is elsewhere.

    Args:
        local_path: where the run is a directory, a relative path is taken from the working
            directory, as verl means it, and links on the way to the run are seen through. Where it
            is a store, any path that has the store's URL in it.
        run: its directory, or the URL of its store.
    """
    if isinstance(run, str):
        return _after(Path(local_path), as_path(run))
    path = Path(local_path).absolute()
    if path.is_relative_to(run):
        return path.relative_to(run)
    if path.resolve().is_relative_to(run.resolve()):
        return path.resolve().relative_to(run.resolve())
    return None


def as_path(url: str) -> Path:
    """The relative path that verl makes of a store's URL. Raises `StoreUrlError`."""
    return Path(str(parse(url)))


def step_and_folder(local_path: str | Path, run: Path | str) -> tuple[int, str]:
    """(step, folder inside it) of ``<run>/global_step_N/<folder>``.

    Raises:
        ValueError: ``local_path`` is anything else.
        UnsafePathError: the folder leaves the step.
    """
    return split(inside_run(local_path, run), local_path, run)


def split(inside: Path | None, local_path: str | Path, run: Path | str) -> tuple[int, str]:
    """As `step_and_folder`, of what `inside_run` gave; the other arguments are for messages."""
    parts = () if inside is None else inside.parts
    step = parse_step(parts[0]) if parts else None
    if step is None or len(parts) < 2:
        raise ValueError(
            f"{local_path} is not a place of this run; expected "
            f"{run}/global_step_N/<folder>, such as {run}/global_step_1/actor"
        )
    return step, str(relative_path("/".join(parts[1:])))


def _after(path: Path, url: Path) -> Path | None:
    """What follows the parts of ``url`` in ``path``, the last time that they are there."""
    size = len(url.parts)
    for start in reversed(range(len(path.parts) - size + 1)):
        if path.parts[start : start + size] == url.parts:
            return Path(*path.parts[start + size :])
    return None
