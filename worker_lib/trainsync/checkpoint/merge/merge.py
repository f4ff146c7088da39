"""Make a Hugging Face model directory of a committed step, on a machine without accelerators.

No process group, and never the whole model in memory: shards are mapped, and one tensor at a time
is put together and written.
"""

import errno
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import CorruptCheckpointError, MergeError, StateMismatchError
from trainsync.checkpoint.load.file_checks import FileChecks
from trainsync.checkpoint.load.reshard.files import MappedShards
from trainsync.checkpoint.load.reshard.read import ComponentRead
from trainsync.checkpoint.megatron_shards import MegatronShards, is_megatron
from trainsync.checkpoint.merge.lora import BaseModel, read_meta
from trainsync.checkpoint.merge.megatron import MegatronWeights
from trainsync.checkpoint.merge.names import expected_names
from trainsync.checkpoint.merge.output import (
    check_output,
    check_room,
    make_durable,
    publish,
    say_dtype,
)
from trainsync.checkpoint.merge.safetensors import TensorEntry, partition, write
from trainsync.checkpoint.merge.step_files import StepFiles
from trainsync.checkpoint.merge.weights import MergedWeights
from trainsync.storage import atomic, digest
from trainsync.storage.errors import FileCheckError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import reading
from trainsync.storage.saves.manifest import Manifest, check_file, committed_steps, read_manifest
from trainsync.storage.saves.receipts import FileEntry

logger = logging.getLogger(__name__)

DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
MAX_SHARD_BYTES: Final = 5_000_000_000  # as transformers has it
_INDEX: Final = "model.safetensors.index.json"
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@dataclass(frozen=True)
class MergeResult:
    """The files that `merge_to_hf` wrote.

    Attributes:
        output: the directory.
        step: whose weights they are.
        tensors: how many.
        bytes: of the weights.
        files: names in ``output``, sorted.
        tied: names that were left out, since transformers ties them to another one.
    """

    output: Path
    step: int
    tensors: int
    bytes: int
    files: tuple[str, ...]
    tied: tuple[str, ...]


def merge_to_hf(
    directory: Path,
    step: int,
    output: Path,
    *,
    kind: SaveKind = SaveKind.CHECKPOINT,
    dtype: str | None = None,
    subdir: str | None = None,
    base: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> MergeResult:
    """Put the shards of a committed step together, as ``from_pretrained`` loads them.

    Every file is checked against the manifest; a lease keeps the step on the volume meanwhile.
    ``output`` appears when it is complete, and nothing that was read is damaged.

    Args:
        directory: of the run.
        output: a new or empty directory, outside the run's.
        dtype: of floating-point weights, a key of `DTYPES`; None leaves each as it was saved.
        subdir: folder of the model's shards in the step; None where only one folder has any.
        base: Hugging Face directory of the base model, for a LoRA adapter that was saved alone;
            it is read as it is.
        on_progress: told bytes done and bytes in all: those that are checked and those written;
            one call at a time, from several threads.

    Raises:
        MergeError: it cannot be done; says what was expected.
        CorruptCheckpointError: a file is missing, cut short or differs.
        StorageError: the step went while it was read, or its manifest is damaged.
        OSError: a disk failed.
    """
    check_dtype(dtype)
    if max_shard_bytes < 1:
        raise MergeError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    run = RunDirectory(directory)
    output = output.absolute()
    check_output(run.root, output)
    manifest = _manifest(run, kind, step)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = atomic.temporary_name(output)
    try:
        temporary.mkdir()
        with ExitStack() as stack:
            try:
                lease = stack.enter_context(reading(run, kind, step, "merge"))
                manifest = lease.committed.manifest
            except OSError as error:
                if error.errno not in _READ_ONLY:
                    raise
                # What was mapped stays readable, and what goes before is missed loudly.
                logger.warning("the step is read without a lease, on a read-only volume: %s", error)
            floats = None if dtype is None else DTYPES[dtype]
            merge = _Merge(run, manifest, subdir, floats, base, on_progress)
            entries, files, tied = merge.write(temporary, max_shard_bytes)
            make_durable(temporary)
        publish(temporary, output)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, StateMismatchError):
            raise MergeError(str(error)) from error
        raise
    return MergeResult(
        output=output,
        step=step,
        tensors=len(entries),
        bytes=sum(entry.bytes for entry in entries),
        files=tuple(sorted(files)),
        tied=tuple(sorted(tied)),
    )


def check_dtype(dtype: str | None) -> None:
    """See that weights can be written in ``dtype``. Raises `MergeError`."""
    if dtype is not None and dtype not in DTYPES:
        raise MergeError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")


class _Merge:
    """One merge, from the manifest to the files in a temporary directory."""

    def __init__(
        self,
        run: RunDirectory,
        manifest: Manifest,
        subdir: str | None,
        dtype: torch.dtype | None,
        base_model: Path | None,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._base_model = base_model
        self._base = run.step(manifest.step)
        self._on_progress = on_progress
        self._done = self._total = 0
        self._telling = threading.Lock()
        self._listed = {entry.path: entry for entry in manifest.files}
        self._files = StepFiles.of(manifest, subdir)
        try:
            self._weights = self._open(self._base / self._files.folder, dtype)
        except Exception:
            # If it is damaged, that is why.
            self._check(self._entry(self._files.component.path(0)))
            raise

    def _open(self, config: Path, dtype: torch.dtype | None) -> MergedWeights | MegatronWeights:
        component = self._files.component
        files = MappedShards(self._base.joinpath)
        reading = ComponentRead(files, component, 0, 1)
        if not is_megatron(reading.state):
            base = None if self._base_model is None else BaseModel(self._base_model)
            meta = self._files.adapter
            if meta is None:
                return MergedWeights(reading, dtype, base=base)
            self._check(meta)
            lora = read_meta((self._base / meta.path).read_bytes())
            return MergedWeights(reading, dtype, lora, base)
        if self._base_model is not None:
            raise MergeError("base is given with the shards of a Megatron model; expected none")
        try:  # it says how weights are fused
            check_file(self._base, self._files.small["config.json"], with_digest=True)
        except (FileCheckError, FileNotFoundError) as error:
            raise CorruptCheckpointError(str(error)) from error
        return MegatronWeights(MegatronShards(files.open, component), config, dtype)

    def write(self, folder: Path, most: int) -> tuple[list[TensorEntry], list[str], list[str]]:
        """Fill ``folder``; returns what was written, the files, and names that were left out."""
        weights = self._weights
        checked = [self._entry(path) for path in sorted(weights.paths)]
        self._total = sum(entry.bytes for entry in weights.entries)
        self._total += sum(file.bytes for file in [*self._files.small.values(), *checked])
        for path, file in self._files.small.items():
            self._check(file)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._base / file.path, folder / path)
        floating = {entry.dtype for entry in weights.entries if entry.dtype.is_floating_point}
        say_dtype(folder / "config.json", floating)
        expected = expected_names(folder)  # before the many bytes, since it may refuse
        if expected is not None:
            weights.fit(expected)
        check_room(folder.parent, sum(e.bytes for e in weights.entries), "the merged weights")
        with FileChecks(self._base, checked, self._progress), _one_thread():
            planned = sum(entry.bytes for entry in weights.entries)
            tied = weights.leave_out_tied()
            self._total -= planned - sum(entry.bytes for entry in weights.entries)
            files = self._write_weights(folder, weights.entries, most)
        return weights.entries, [*self._files.small, *files], tied

    def _write_weights(self, folder: Path, entries: Sequence[TensorEntry], most: int) -> list[str]:
        parts = partition(entries, most)
        names = ["model.safetensors"]
        if len(parts) > 1:
            count = len(parts)
            names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
        for file_name, part in zip(names, parts, strict=True):
            tensors = (self._weights.tensor(entry) for entry in part)
            write(folder / file_name, part, tensors, self._progress)
        if len(parts) == 1:
            return names
        index = {
            "metadata": {"total_size": sum(entry.bytes for entry in entries)},
            "weight_map": {
                entry.name: file_name
                for file_name, part in zip(names, parts, strict=True)
                for entry in part
            },
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return [*names, _INDEX]

    def _entry(self, path: str) -> FileEntry:
        if path not in self._listed:
            raise CorruptCheckpointError(f"the manifest does not list {path}")
        return self._listed[path]

    def _check(self, entry: FileEntry) -> None:
        try:
            check_file(self._base, entry, with_digest=False)
            found = digest.file_digest(self._base / entry.path, self._progress)
        except (FileCheckError, FileNotFoundError) as error:
            raise CorruptCheckpointError(str(error)) from error
        if found != entry.digest:
            raise CorruptCheckpointError(
                f"{self._base / entry.path} has digest {found}, expected {entry.digest}"
            )

    def _progress(self, count: int) -> None:
        with self._telling:
            self._done += count
            self._on_progress(self._done, self._total)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch copy in the caller's thread alone: that keeps up with any disk, and torch's other
    threads would spin on cores that have digests to take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _manifest(run: RunDirectory, kind: SaveKind, step: int) -> Manifest:
    try:
        return read_manifest(run, kind, step).manifest
    except FileNotFoundError as error:
        steps = committed_steps(run, kind)
        there = f"the last are {', '.join(map(str, steps[-5:]))}" if steps else "there is none"
        raise MergeError(
            f"no {kind.value} of step {step} is committed in {run.root}; {there}"
        ) from error
