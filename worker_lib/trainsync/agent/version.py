"""A version of a run's weights that servers may take, as an agent knows it."""

import hashlib
from dataclasses import dataclass

from trainsync.engines.servers.tags import tag_of
from trainsync.storage.saves.manifest import Manifest
from trainsync.weights.transports.anchors.index import VersionRow
from trainsync.weights.versions import CheckpointLocation, Published

_WEIGHTS = (".pt", ".safetensors")


@dataclass(frozen=True)
class Version:
    """One version.

    Attributes:
        run_uid: of the run.
        attempt: of the run, in which this version is the newest one.
        digest: of the weights, the same when a step is committed again with the same bytes. On a
            volume sha256:<hex> of a line ``<path> <bytes> <digest>`` for each file with weights, in
            the manifest's order; in a store that of the stream (`VersionRow.digest`).
        published: where the bytes are.
        restarts: in place, of the attempt, before this version was the newest one.
    """

    run_uid: str
    attempt: int
    digest: str
    published: Published
    restarts: int = 0

    @property
    def step(self) -> int:
        """The trainer's global step."""
        return self.published.meta.version

    @property
    def tag(self) -> str:
        """The name that a server gives these weights."""
        return tag_of(self.step, self.digest)

    def is_trained_with(self, other: "Version") -> bool:
        """Whether one attempt, with no restart in place between them, has both, so that steps tell
        how far they are apart."""
        mine = self.run_uid, self.attempt, self.restarts
        return mine == (other.run_uid, other.attempt, other.restarts)

    def follows(self, other: "Version | None") -> bool:
        """Whether a server that takes ``other`` has to take this one now.

        The server has to when the run has got further, in a newer attempt or after a restart in
        place also at an earlier step; when the run has replaced ``other`` by other weights of the
        same step; and when this version is of another run.
        """
        if other is None or self.run_uid != other.run_uid:
            return True
        mine = self.attempt, self.restarts, self.step
        others = other.attempt, other.restarts, other.step
        return mine > others or (mine == others and self.tag != other.tag)


def weights_digest(manifest: Manifest) -> str:
    """See `Version.digest`."""
    hasher = hashlib.sha256()
    for entry in manifest.files:
        if entry.path.endswith(_WEIGHTS):
            hasher.update(f"{entry.path} {entry.bytes} {entry.digest}\n".encode())
    return f"sha256:{hasher.hexdigest()}"


def on_volume(step: int, path: str, manifest_digest: str, bytes: int, saved_by: int) -> Published:
    """A committed state dict, as it is published.

    Args:
        path: of the step's folder in the run's directory.
        saved_by: the attempt that committed it.
    """
    location = CheckpointLocation(path, manifest_digest, saved_by, step)
    return Published.saved(step, manifest_digest, bytes, location)


def in_store(row: VersionRow) -> Version:
    """A version that the index of a store names."""
    owner = row.owner
    published = Published.stored(row.weight_version, row.digest, row.bytes)
    attempt, restarts = owner.age
    return Version(owner.run_uid, attempt, row.digest, published, restarts)
