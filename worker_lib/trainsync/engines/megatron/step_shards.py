"""The shard files of a step that a Megatron rank reads: from the memory of its pod where they lie
there whole, else from the volume."""

import json
import socket
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress

from trainsync.checkpoint.errors import CheckpointError
from trainsync.checkpoint.load.account import LoadedBytes
from trainsync.checkpoint.load.reshard.files import MappedShards
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.verify import Need, assign, refuse_store, verify_all
from trainsync.checkpoint.megatron_shards import MegatronShards
from trainsync.checkpoint.memory.lookup import Sources
from trainsync.checkpoint.memory.neighbour.fetching import bring
from trainsync.dist.agreement import Agreement


class StepShards:
    """One rank's reads of a committed step.

    Every shard file says which parts of the model it holds. Unless this rank's own file is enough,
    all of them are opened to find those that it reads. Only these are compared with the manifest.

    Args:
        memory: finds files of the step; the caller closes it.
        ranks: those that load.

    Attributes:
        resume: the step.
        memory, ranks: see Args.

    Raises:
        UnsupportedPlaceError: the step is in a store.
    """

    def __init__(self, resume: Resume, memory: Sources, ranks: Agreement) -> None:
        refuse_store(resume)
        self.resume = resume
        self.memory = memory
        self.ranks = ranks

    def bring(self, components: Iterable[Component], seconds: float) -> None:
        """Fetch from the memory of other pods the files that the rank of this number saved, if its
        own pod lacks them; all ranks call it alike. See `bring` for arguments and errors.
        """
        ranks = self.ranks
        own = [
            found.path(ranks.rank)
            for found in components
            if found.is_saved_by(ranks.rank, ranks.world_size)
        ]
        bring(self.resume, lambda: own, self.memory, ranks, seconds)

    def open(
        self, component: Component, needed: Callable[[MegatronShards], set[str]]
    ) -> tuple[MegatronShards, set[str]]:
        """The shards of a component, and the files that this rank reads of them.

        Those files were compared with the manifest as far as they lie in memory. What lies there
        with other bytes is as if it were not there.

        Args:
            needed: plans what is read, from what the files say of themselves; may be called again.

        Raises:
            CorruptCheckpointError: a file is missing, or the files contradict each other.
            What ``needed`` raises.
        """
        ranks = self.ranks
        if component.is_saved_by(ranks.rank, ranks.world_size):
            with suppress(CheckpointError):  # in the layout that saved it mostly is enough
                return self._open(component, {ranks.rank}, needed)
        return self._open(component, component.ranks, needed)

    def _open(
        self,
        component: Component,
        ranks: Set[int],
        needed: Callable[[MegatronShards], set[str]],
    ) -> tuple[MegatronShards, set[str]]:
        opened = [component.path(rank) for rank in ranks]
        while True:
            try:
                shards = MegatronShards(MappedShards(self.memory.glance).open, component, ranks)
                paths = needed(shards)
            except Exception:
                if not self.memory.only_glanced(opened):
                    raise
                self.memory.find(opened)  # other bytes say anything
                continue
            before = {path: self.memory.glance(path) for path in paths}
            self.memory.find(paths)
            if all(self.memory.path(path) == before[path] for path in paths):
                return shards, paths

    def check(self, plan: Callable[[], set[str]], doing: str) -> LoadedBytes:
        """Plan on all ranks, then compare with the manifest what is read from the volume, each
        file once a host.

        Args:
            plan: returns the files that this rank reads.
            doing: the plan, for error messages.

        Returns:
            The bytes of this rank's files.

        Raises:
            What ``plan`` raises. CorruptCheckpointError: a file differs from the manifest.
            LoadFailedError: another rank failed; names it, and its cause.
        """
        read: list[LoadedBytes] = []

        def unchecked() -> str:
            paths = plan()
            read.append(self.memory.bytes(paths))
            rest = sorted(path for path in paths if not self.memory.in_memory(path))
            return json.dumps([socket.gethostname(), rest])

        answers = [json.loads(answer) for answer in self.ranks.do(doing, unchecked)]
        needs = [Need(host, frozenset(paths)) for host, paths in answers]
        sizes = {entry.path: entry.bytes for entry in self.resume.manifest.files}
        self.ranks.do("checking the files", lambda: self._verify(assign(needs, sizes)))
        return read[0]

    def _verify(self, work: Sequence[Sequence[str]]) -> str:
        verify_all(self.resume, work[self.ranks.rank])
        return ""
