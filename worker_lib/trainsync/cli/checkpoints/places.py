"""The places that the commands look at: a run's directory, or a store in object storage."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.cli.checkpoints import reports
from trainsync.cli.checkpoints.prune import plan as prune_plan
from trainsync.cli.checkpoints.reports import Kept, SaveReport
from trainsync.cli.options import chosen, open_run
from trainsync.cli.output.console import USAGE, fail
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.inspect import leftovers as leftovers
from trainsync.storage.inspect import pointers as pointing
from trainsync.storage.inspect import saves as volume_saves
from trainsync.storage.inspect.findings import Finding
from trainsync.storage.inspect.internal import in_internal
from trainsync.storage.inspect.saves import InspectedSave
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects import address, commits, inspecting, keys, removal
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.storage.objects.inspecting import StoredSave
from trainsync.storage.objects.of_run import options_of_run
from trainsync.storage.objects.opening import StoreOptions, open_store
from trainsync.storage.saves import pointers, receipts
from trainsync.storage.saves.manifest import Manifest


class CheckpointPlace(Protocol):
    """What `ls`, `show` and `verify` ask; all may raise `OSError` and `StorageError`."""

    @property
    def name(self) -> str:
        """As the person gave it."""
        ...

    def saves(self, step: int | None = None) -> list[InspectedSave]:
        """Every save, or those at ``step``, compared with its manifest by size."""
        ...

    def around(self, step: int) -> list[InspectedSave]:
        """The saves at ``step``, and those that are cheap to have, to judge the pointers."""
        ...

    def reports(
        self, saves: Sequence[InspectedSave], removed: Collection[int] | None = None
    ) -> list[SaveReport]:
        """See `reports.report`."""
        ...

    def pointer_findings(self, saves: Sequence[InspectedSave]) -> list[Finding]:
        """What is wrong with the pointers; ``saves`` are all."""
        ...

    def removals(self, saves: Sequence[InspectedSave], keep: int) -> list[int]:
        """Steps that prune would remove; ``saves`` are all."""
        ...

    def chosen_step(self, text: str, kind: SaveKind | None) -> int:
        """See `trainsync.cli.options.chosen`."""
        ...

    def seconds(self, record: Manifest) -> float | None:
        """From a save's registration to its commit; None where that is not known any more."""
        ...

    def bytes_to_read(self, saves: Sequence[InspectedSave]) -> int:
        """The bytes that `check_digests` will read."""
        ...

    def check_digests(
        self, saves: Sequence[InspectedSave], threads: int, on_bytes: Callable[[int], None]
    ) -> list[InspectedSave]:
        """The saves, with what reading every byte found."""
        ...

    def kept(self, save: InspectedSave) -> Mapping[str, Kept]:
        """What files of a save have in common with an older step, by path."""
        ...

    def beside(self, saves: Sequence[InspectedSave], step: int | None) -> list[Finding]:
        """What is there beside the saves, or beside those at ``step``."""
        ...


def open_place(text: str, options: StoreOptions) -> CheckpointPlace:
    """The place that ``text`` names; ends the command when it is of no run.

    Raises:
        OSError, StorageError: it cannot be read.
    """
    if address.is_url(text):
        return StorePlace(open_bucket(text, options))
    refuse_options(options)
    return DirectoryPlace(open_run(Path(text)))


def open_bucket(text: str, options: StoreOptions) -> ObjectBucket:
    """The store of the URL ``text``; ends the command when it holds something else than a run.

    Raises:
        StorageError: it cannot be read.
    """
    bucket = store_of(text, options)
    if not inspecting.is_store(bucket):
        fail(
            f"{bucket.name} holds no checkpoints of a run, but other objects: give the prefix that "
            "they were copied to",
            USAGE,
        )
    return bucket


def store_of(text: str, options: StoreOptions) -> ObjectBucket:
    """The store of the URL ``text``, whatever it holds; ends the command when the URL is wrong.

    In a pod of a run the run's own store is opened as its processes do.
    """
    if options == StoreOptions() and text == os.environ.get(env.CHECKPOINT_DIR):
        options = options_of_run()
    try:
        return open_store(text, options)
    except StoreUrlError as error:
        fail(str(error), USAGE)


def refuse_options(options: StoreOptions) -> None:
    """Ends the command when there are options of a store, and no store."""
    if options.endpoint is not None or options.region is not None or options.allow_http:
        fail("--endpoint, --region and --allow-http are for the URL of a store", USAGE)


class DirectoryPlace:
    """A run's directory."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.name = str(run.root)

    def saves(self, step: int | None = None) -> list[InspectedSave]:
        """See `CheckpointPlace`."""
        return volume_saves.check_all_sizes(self.run, step)

    def around(self, step: int) -> list[InspectedSave]:
        """See `CheckpointPlace`: all."""
        del step
        return self.saves()

    def reports(
        self, saves: Sequence[InspectedSave], removed: Collection[int] | None = None
    ) -> list[SaveReport]:
        """See `CheckpointPlace`."""
        return reports.report(self.run, saves, removed)

    def pointer_findings(self, saves: Sequence[InspectedSave]) -> list[Finding]:
        """See `CheckpointPlace`."""
        return pointing.check_pointers(self.run, saves)

    def removals(self, saves: Sequence[InspectedSave], keep: int) -> list[int]:
        """See `CheckpointPlace`."""
        return prune_plan.choose(self.run, list(saves), keep)

    def chosen_step(self, text: str, kind: SaveKind | None) -> int:
        """See `CheckpointPlace`."""
        return chosen(self.name, lambda k: pointers.read_pointer(self.run, k), text, kind)

    def seconds(self, record: Manifest) -> float | None:
        """See `CheckpointPlace`: while staging tells it."""
        staged = self.run.save(record.attempt, record.incarnation, record.kind, record.step)
        try:
            registered = receipts.read_registration(staged).created_at
        except (FileNotFoundError, DamagedFileError):
            return None
        return max((record.created_at - registered).total_seconds(), 0.0)

    def bytes_to_read(self, saves: Sequence[InspectedSave]) -> int:
        """See `CheckpointPlace`."""
        return volume_saves.bytes_to_read(saves)

    def check_digests(
        self, saves: Sequence[InspectedSave], threads: int, on_bytes: Callable[[int], None]
    ) -> list[InspectedSave]:
        """See `CheckpointPlace`."""
        return volume_saves.check_digests(self.run, saves, threads=threads, on_bytes=on_bytes)

    def kept(self, save: InspectedSave) -> Mapping[str, Kept]:
        """See `CheckpointPlace`: none."""
        del save
        return {}

    def beside(self, saves: Sequence[InspectedSave], step: int | None) -> list[Finding]:
        """See `CheckpointPlace`."""
        if step is not None:
            return leftovers.in_steps(self.run, saves, step)
        return [
            *pointing.check_pointers(self.run, saves),
            *leftovers.in_root(self.run),
            *leftovers.in_steps(self.run, saves),
            *leftovers.in_staging(self.run),
            *in_internal(self.run),
        ]


class StorePlace:
    """A store in object storage. Its saves have no leases."""

    def __init__(self, bucket: ObjectBucket) -> None:
        self.bucket = bucket
        self.name = bucket.name
        self._found: dict[tuple[SaveKind, int], StoredSave] = {}

    def saves(self, step: int | None = None) -> list[InspectedSave]:
        """See `CheckpointPlace`."""
        found = inspecting.check_all_sizes(self.bucket, step)
        self._found |= {(one.save.kind, one.save.step): one for one in found}
        return [one.save for one in found]

    def around(self, step: int) -> list[InspectedSave]:
        """See `CheckpointPlace`: each other one would be two requests more."""
        return self.saves(step)

    def stored(self, saves: Sequence[InspectedSave]) -> list[StoredSave]:
        """``saves``, which `saves` found, with the keys of their objects."""
        return [
            StoredSave(save, self._found[(save.kind, save.step)].stored)
            for save in saves
            if (save.kind, save.step) in self._found
        ]

    def reports(
        self, saves: Sequence[InspectedSave], removed: Collection[int] | None = None
    ) -> list[SaveReport]:
        """See `CheckpointPlace`."""
        return reports.report_on(saves, inspecting.targets(self.bucket), {}, removed)

    def pointer_findings(self, saves: Sequence[InspectedSave]) -> list[Finding]:
        """See `CheckpointPlace`."""
        return inspecting.check_pointers(self.bucket, saves)

    def removals(self, saves: Sequence[InspectedSave], keep: int) -> list[int]:
        """See `CheckpointPlace`."""
        return removal.choose(self.bucket, self.stored(saves), keep)

    def chosen_step(self, text: str, kind: SaveKind | None) -> int:
        """See `CheckpointPlace`."""
        return chosen(self.name, lambda k: commits.read_pointer(self.bucket, k), text, kind)

    def seconds(self, record: Manifest) -> float | None:
        """See `CheckpointPlace`: a store does not know."""
        del record
        return None

    def bytes_to_read(self, saves: Sequence[InspectedSave]) -> int:
        """See `CheckpointPlace`."""
        return inspecting.bytes_to_read(self.stored(saves))

    def check_digests(
        self, saves: Sequence[InspectedSave], threads: int, on_bytes: Callable[[int], None]
    ) -> list[InspectedSave]:
        """See `CheckpointPlace`."""
        checked = inspecting.check_digests(
            self.bucket, self.stored(saves), threads=threads, on_bytes=on_bytes
        )
        return [one.save for one in checked]

    def kept(self, save: InspectedSave) -> Mapping[str, Kept]:
        """See `CheckpointPlace`."""
        (found,) = self.stored([save])
        if (stored := found.stored) is None:
            return {}
        kept = {}
        for entry in stored.manifest.files:
            size = receipts.kept_bytes(entry, stored.kept, stored.bases)
            if size:
                whole = size == entry.bytes
                key = stored.keys[entry.path] if whole else stored.bases[entry.path].key
                kept[entry.path] = Kept(keys.step_of(key), size)
        return kept

    def beside(self, saves: Sequence[InspectedSave], step: int | None) -> list[Finding]:
        """See `CheckpointPlace`."""
        unlisted = inspecting.unlisted_findings(self.bucket, self.stored(saves))
        if step is not None:
            return [finding for finding in unlisted if finding.step == step]
        return [*inspecting.check_pointers(self.bucket, saves), *unlisted]
