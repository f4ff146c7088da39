"""Promises of a run in a bucket, checked on the files of the S3 server alone.

Nothing of the library reads here but what it says of names of shards: objects, manifests and
records are read as JSON and bytes.
"""

import base64
import io
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.shard_names import parse_shard_file_name
from trainsync.monitor.ledger.saves import SaveOwner

from tests.faults.plan import Plan, Step, same
from tests.faults.processes import BrokenError
from tests.faults.promises import Watch

_KIND: Final = SaveKind.CHECKPOINT
_POINTER: Final = "latest_checkpointed_iteration.txt"
_MANIFEST: Final = re.compile(r"^global_step_([0-9]+)\.json$")
_FOLDER: Final = re.compile(r"^run-([0-9]+)-([a-z0-9]+)-[a-z0-9]+$")
_MARK: Final = b"a manifest may follow, of "
"""What reserves a manifest's key begins with it."""
_OWNER: Final = re.compile(r"^([0-9]+)-([a-z0-9]+)$")


@dataclass(frozen=True)
class Manifest:
    """A committed save, as its object says."""

    step: int
    owner: SaveOwner
    files: tuple[dict[str, Any], ...]

    @property
    def keys(self) -> set[str]:
        """Keys of its objects."""
        bases = {file["base"]["key"] for file in self.files if "base" in file}
        return bases | {file["key"] for file in self.files}


class Reading:
    """The objects below the run's prefix; ``root`` is its directory on the server's disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def pointer(self) -> int | None:
        """The step that the pointer names."""
        try:
            text = (self.root / _POINTER).read_text()
        except FileNotFoundError:
            return None
        if not text.strip().isdecimal():
            raise BrokenError(f"the pointer holds {text!r}")
        return int(text)

    def has_manifest(self, step: int) -> bool:
        """Whether the step is committed."""
        data = self.bytes_of(f"manifests/{_KIND}/global_step_{step}.json")
        return data is not None and not data.startswith(_MARK)

    def manifests(self) -> list[Manifest]:
        """Every committed save, by step."""
        found = []
        for path in self._listed(f"manifests/{_KIND}"):
            match = _MANIFEST.match(path.name)
            if match is None:
                raise BrokenError(f"{path.name} lies among the manifests")
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue  # retention has just removed it
            if data.startswith(_MARK):
                continue
            try:
                record = json.loads(data)
            except ValueError as error:
                raise BrokenError(f"{path.name} is no manifest: {error}") from error
            if record["step"] != int(match[1]):
                raise BrokenError(f"{path.name} is the manifest of step {record['step']}")
            owner = SaveOwner(record["attempt"], record["incarnation"])
            found.append(Manifest(record["step"], owner, tuple(record["files"])))
        return sorted(found, key=lambda one: one.step)

    def bytes_of(self, key: str) -> bytes | None:
        """An object; None: there is none."""
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def below(self, folder: str) -> list[str]:
        """Keys of all objects below ``folder``."""
        walk = os.walk(self.root / folder)  # passes over folders that go meanwhile
        return sorted(
            Path(place, name).relative_to(self.root).as_posix()
            for place, _, names in walk
            for name in names
        )

    def intent(self) -> Manifest | None:
        """The save that the term's holder was about to commit."""
        data = self.bytes_of("run/TERM.json")
        intent = None if data is None else json.loads(data).get("intent")
        if intent is None:
            return None
        record = json.loads(intent["manifest"])
        owner = SaveOwner(record["attempt"], record["incarnation"])
        return Manifest(record["step"], owner, tuple(record["files"]))

    def is_complete(
        self, owner: SaveOwner, participants: Iterable[tuple[str, int]], step: int
    ) -> bool:
        """Whether all that a monitor needs to commit the save is there."""
        folder = f"run/saves/{owner.attempt}-{owner.incarnation}/{_KIND}/global_step_{step}"
        there = {key.removeprefix(f"{folder}/") for key in self.below(folder)}
        ended = "OUTCOME.json" in there or any(key.startswith("failures/") for key in there)
        receipts = {f"receipts/{name}.{rank}.json" for name, rank in participants}
        return not ended and {"REGISTRATION.json", *receipts} <= there

    def _listed(self, folder: str) -> list[Path]:
        try:
            return [path for path in (self.root / folder).iterdir() if path.is_file()]
        except FileNotFoundError:
            return []


class BucketWatch(Watch):
    """Checks the pointer during a whole trial: it names a commit and never goes back."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.newest: dict[SaveKind, int] = {}
        self.is_off = False
        """Whether somebody else has changed the bucket."""

    def look(self) -> None:
        """Check the pointer once; cheap enough for every few milliseconds."""
        if self.is_off:
            return
        before = self.newest.get(_KIND)
        step = self._reading.pointer()
        if step is None:
            if before is not None:
                raise BrokenError(f"the pointer is gone; it named {before}")
            return
        if before is not None and step < before:
            raise BrokenError(f"the pointer went back from {before} to {step}")
        self.newest[_KIND] = step
        # Read the pointer again if the manifest is missing: retention may have followed a newer
        # commit.
        if not self._reading.has_manifest(step) and self._reading.pointer() == step:
            raise BrokenError(f"the pointer names {step}, which has no manifest")


def check_commits(
    reading: Reading, plan: Plan, owners: Iterable[SaveOwner], steps: dict[tuple[int, int], Step]
) -> list[int]:
    """Check that every manifest is of an attempt of the run, and that all its objects are there and
    hold what that attempt had, bit for bit; returns the committed steps.

    Args:
        owners: attempts that may have committed.
        steps: the step that (attempt, number) saved.
    """
    known = set(owners)
    found = []
    for manifest in reading.manifests():
        try:
            check_commit(reading, plan, known, steps, manifest)
        except BrokenError:
            if reading.has_manifest(manifest.step):
                raise
            continue  # a live monitor has just removed the step
        found.append(manifest.step)
    return found


def check_commit(
    reading: Reading,
    plan: Plan,
    owners: set[SaveOwner],
    steps: dict[tuple[int, int], Step],
    manifest: Manifest,
) -> None:
    """Check one committed save; see `check_commits`."""
    step, attempt = manifest.step, manifest.owner.attempt
    if manifest.owner not in owners:
        raise BrokenError(f"step {step} was committed by a stranger, {manifest.owner}")
    listed = {file["path"] for file in manifest.files}
    shards = {path for path in listed if not path.endswith(".xxh3-blocks")}
    if shards != plan.files(_KIND, steps[attempt, step]):
        raise BrokenError(f"step {step} lists {sorted(listed)}")
    for file in manifest.files:
        data = _object(reading, step, file["key"])
        if (base := file.get("base")) is not None:
            data = _put_together(data, _object(reading, step, base["key"]), base)
        if len(data) != file["bytes"]:
            raise BrokenError(
                f"committed step {step} is torn: {file['key']} has {len(data)} bytes, its "
                f"manifest says {file['bytes']}"
            )
        if f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}" != file["digest"]:
            raise BrokenError(f"committed step {step} is torn: the digest of {file['key']}")
        if file["path"] in shards:
            _check_content(plan, attempt, step, file["path"], data)


def _object(reading: Reading, step: int, key: str) -> bytes:
    data = reading.bytes_of(key)
    if data is None:
        raise BrokenError(f"step {step} is committed, and its object {key} is gone")
    return data


def _put_together(own: bytes, older: bytes, base: dict[str, Any]) -> bytes:
    """The bytes of a file whose own object has some blocks of it, and an older one the others."""
    size, bits = base["block"], base64.b64decode(base["own"])
    found, at = bytearray(), 0
    for number, start in enumerate(range(0, len(older), size)):
        block = older[start : start + size]
        if bits[number // 8] >> number % 8 & 1:
            block = own[at : at + len(block)]
            at += len(block)
        found += block
    return bytes(found + own[at:])


def _check_content(plan: Plan, attempt: int, step: int, path: str, data: bytes) -> None:
    parsed = parse_shard_file_name(path.rpartition("/")[2])
    if parsed is None:
        raise BrokenError(f"step {step} lists {path}, which nobody writes")
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    if not same(loaded, plan.state(attempt, step, parsed[0], parsed[1])):
        raise BrokenError(
            f"{path} of step {step} does not hold what attempt {attempt} had when it saved"
        )


def orphans(reading: Reading, in_force: SaveOwner) -> list[str]:
    """Keys of what attempts before ``in_force`` have put and no manifest names."""
    named = {key for manifest in reading.manifests() for key in manifest.keys}
    found = []
    for key in [*reading.below("objects"), *reading.below("run/saves")]:
        parts = key.split("/")
        match = (_FOLDER if parts[0] == "objects" else _OWNER).match(parts[2])
        if match is None or key in named:
            continue
        if SaveOwner(int(match[1]), match[2]) != in_force:
            found.append(key)
    return found
