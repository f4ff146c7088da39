"""Records of the existing clusters, and locks between commands."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.paths import MAX_CLUSTERS, STATE_ROOT, Cluster
from devcluster.shell import Progress, wait_until, write_json

_LOCK_SECONDS = 900
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?")


@dataclass(frozen=True)
class Record:
    """The request for which the cluster was made."""

    name: str
    index: int
    nodes: int
    tools: str
    """Key of the programs that the cluster runs."""
    addons: str = ""
    """Key of the applied manifests; empty until they are applied."""
    policies: bool = False
    """Whether every node runs a policy controller."""

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.name, self.index)


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise DevclusterError(
            f"cluster name {name!r} is wrong: expected up to 20 lower-case letters, digits and "
            "dashes, with a letter first"
        )


def read_record(name: str) -> Record | None:
    """The record of a cluster, or None."""
    path = Cluster(name, 0).record
    try:
        return Record(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DevclusterError(f"{path} is unreadable ({error}); run `down`") from error


def write_record(record: Record) -> None:
    written = asdict(record)
    if not record.policies:
        # An older checkout, which shares the cluster, refuses a field that it does not know.
        del written["policies"]
    write_json(record.cluster.record, written)


def allocate(name: str, nodes: int, tools: str, taken: Sequence[ipaddress.IPv4Network]) -> Record:
    """Register a new cluster under the first index whose address ranges are free.

    ``taken`` are the networks of this machine's routes.
    """
    STATE_ROOT.mkdir(parents=True, exist_ok=True)
    with _locked(STATE_ROOT / ".registry.lock", None):
        used = {_index(path) for path in STATE_ROOT.glob("*/cluster.json")}
        for index in range(MAX_CLUSTERS):
            cluster = Cluster(name, index)
            if index not in used and not any(cluster.overlaps(network) for network in taken):
                record = Record(name, index, nodes, tools)
                write_record(record)
                return record
    raise DevclusterError(
        f"no free address ranges for cluster {name!r}: "
        f"{len(used)} clusters are registered below {STATE_ROOT}, and this machine has routes to "
        + ", ".join(str(network) for network in taken)
    )


def _index(path: Path) -> int:
    try:
        return int(json.loads(path.read_text())["index"])
    except (ValueError, KeyError, TypeError) as error:
        raise DevclusterError(f"{path} is unreadable ({error}); remove that cluster") from error


@contextmanager
def cluster_lock(name: str, progress: Progress) -> Iterator[None]:
    """Lock a cluster, so that one command at a time changes it."""
    STATE_ROOT.mkdir(parents=True, exist_ok=True)
    with _locked(STATE_ROOT / f".{name}.lock", progress):
        yield


@contextmanager
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
    with path.open("w") as file:

        def taken() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not taken():
            if progress:
                progress.say(
                    "another devcluster command is at work on this cluster: waiting for it"
                )
            wait_until(taken, what=f"the lock {path}", seconds=_LOCK_SECONDS)
        yield
