"""verl's trainer in a run whose checkpoints are in a store: its own files come and go by a local
directory.

verl reads and writes ``latest_checkpointed_iteration.txt``, ``data.pt`` and ``transfer_queue/`` as
files. So for each save, and for the load, it gets a temporary directory in place of the store's
URL. The directory's path ends with the URL, by which the ranks know the run; see
`trainsync.engines.checkpoints.paths`.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.stored import DifferentBytesError, StoredFiles
from trainsync.engines.checkpoints.paths import as_path, inside_run
from trainsync.engines.checkpoints.trainer_state import (
    CarriedFiles,
    read_trainers,
    write_trainers,
)
from trainsync.storage.errors import DamagedFileError, StepGoneError
from trainsync.storage.layout import POINTERS, parse_step, step_name
from trainsync.storage.objects import commits
from trainsync.storage.objects.address import is_url, parse
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError
from trainsync.storage.objects.of_run import open_run_store

SHARED_DIR: Final = "TRAINSYNC_VERL_SHARED_DIR"
"""Environment variable of verl's trainer: where the temporary directories are made. All nodes see
it, where TransferQueue's actors on several nodes write a checkpoint of theirs."""

_KIND: Final = SaveKind.CHECKPOINT
_TRIES: Final = 2  # a byte may change on its way


def store_of(config: Any) -> str | None:
    """URL of the run's store; None for a run on a volume.

    Args:
        config: ``trainer`` of verl's configuration.

    Raises:
        ValueError: ``default_local_dir`` is not the run's place, and one of both is a store.
        StoreUrlError: it is a URL of no store.
    """
    named, run = str(config.default_local_dir), os.environ.get(env.CHECKPOINT_DIR)
    url = str(parse(named)) if is_url(named) else None
    expected = str(parse(run)) if run is not None and is_url(run) else None
    if url != expected and run is not None:
        raise ValueError(
            f"trainer.default_local_dir is {named!r}; expected {run!r}, the place of the run "
            f"({env.CHECKPOINT_DIR})"
        )
    return url


@contextmanager
def directory_for(url: str) -> Iterator[Path]:
    """A new directory in place of the store; it goes with the context."""
    with tempfile.TemporaryDirectory(
        prefix=_prefix(url), dir=_base(), ignore_cleanup_errors=True
    ) as name:
        directory = Path(name) / as_path(url)
        directory.mkdir(parents=True)
        yield directory


def carried(folder: Path) -> CarriedFiles:
    """What verl's trainer wrote into the step's directory ``folder``, for the rank that saves it:
    once in Ray's object store, however many ranks there are."""
    import ray

    files = read_trainers(folder)
    return CarriedFiles(ray.put(files) if ray.is_initialized() else files)


@contextmanager
def resumable(trainer: Any) -> Iterator[None]:
    """Context in which verl's trainer finds the step to resume from, and its own files of the step.

    The ranks read theirs of the store. In a run on a volume nothing changes.

    Args:
        trainer: verl's.

    Raises:
        ValueError: see `store_of`; ``resume_from_path`` is of another store; or TransferQueue
            could not save.
        CorruptCheckpointError: the step is not whole, or only the pointer to it is missing. Of a
            damaged file of the trainer's own it is raised at the context's end: a rank has found
            the damage, too, and told the monitor.
        LoadTimeoutError, StoreError: the store was not read.
    """
    config = trainer.config.trainer
    url = store_of(config)
    if url is None:
        yield
        return
    _check_queue(trainer)
    for path in _base().glob(f"{_prefix(url)}*"):  # of a trainer that was killed
        shutil.rmtree(path, ignore_errors=True)
    if config.resume_mode == "disable":
        yield
        return
    by_path = config.resume_mode == "resume_path"
    if by_path and _is_directory(str(config.resume_from_path), url):
        yield
        return
    with directory_for(url) as directory:
        step = _step_of(str(config.resume_from_path), url) if by_path else _newest(url)
        damage = None if step is None else _bring(url, step, directory)
        before = config.default_local_dir, config.get("resume_from_path", None)
        config.default_local_dir = str(directory)
        if by_path:
            config.resume_from_path = str(directory / step_name(step or 0))
        try:
            yield
        finally:
            config.default_local_dir = before[0]
            if by_path:
                config.resume_from_path = before[1]
        if damage is not None:
            raise damage


def _base() -> Path:
    return Path(os.environ.get(SHARED_DIR) or tempfile.gettempdir())


def _prefix(url: str) -> str:
    return f"trainsync-verl-{hashlib.sha256(url.encode()).hexdigest()[:16]}-"


def _check_queue(trainer: Any) -> None:
    """Raises `ValueError` where TransferQueue's actors would write to disks of their own."""
    if getattr(trainer, "trainer_mode", "sync") == "sync" or os.environ.get(SHARED_DIR):
        return
    import ray

    if not ray.is_initialized():
        return
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())  # type: ignore[no-untyped-call]
    if nodes > 1:
        raise ValueError(
            f"trainer.v1.trainer_mode is {trainer.trainer_mode}, in which TransferQueue writes its "
            f"part of a checkpoint on each of {nodes} nodes; expected {SHARED_DIR} to name a "
            "directory that all of them share, from where the files go into the bucket"
        )


def _is_directory(path: str, url: str) -> bool:
    """Whether verl reads ``path`` itself: it is no URL, and no path that the ranks take for one."""
    return not is_url(path) and inside_run(path, url) is None


def _step_of(path: str, url: str) -> int:
    inside = inside_run(path, url)
    step = parse_step(inside.parts[0]) if inside is not None and len(inside.parts) == 1 else None
    if step is None:
        raise ValueError(
            f"trainer.resume_from_path is {path!r}; expected {url}/global_step_N, or a directory"
        )
    return step


def _newest(url: str) -> int | None:
    """The step that the run resumes from, as the monitor has left the pointer; None: it begins.

    Raises:
        CorruptCheckpointError: there is no pointer, and a step is committed.
    """
    bucket = open_run_store(url)
    step = commits.read_pointer(bucket, _KIND)
    if step is None and (there := commits.committed_steps(bucket, _KIND)):
        raise CorruptCheckpointError(
            f"the pointer of {url} names no step, and step {there[-1]} is committed: training does "
            "not begin at step 0; `trainsync checkpoints repair` puts the pointer back"
        )
    return step


def _bring(url: str, step: int, directory: Path) -> CorruptCheckpointError | None:
    """Make the step's directory, with the trainer's own files, and what verl finds it by.

    Returns:
        what is to be raised after the load, if a file is damaged; then none is there.
    """
    try:
        found = commits.read_manifest(open_run_store(url), _KIND, step)
    except (StepGoneError, DamagedFileError) as error:
        raise CorruptCheckpointError(
            f"step {step} in {url} cannot be resumed from: {error}"
        ) from error
    (directory / POINTERS[_KIND]).write_text(f"{step}\n")
    folder = directory / step_name(step)
    damage: Exception | None = None
    for _ in range(_TRIES):
        folder.mkdir()
        try:
            write_trainers(StoredFiles.named_by(url, found), found.manifest, folder)
            return None
        except (DifferentBytesError, ObjectChangedError, ObjectMissingError) as error:
            damage = error
            shutil.rmtree(folder)
    folder.mkdir()
    return CorruptCheckpointError(f"step {step}: {damage}")
