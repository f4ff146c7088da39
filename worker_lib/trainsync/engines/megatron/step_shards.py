"""The shard files of a step that a Megatron rank reads: from the memory of its pod where they lie
there whole, else from the volume or the bucket."""

import json
import socket
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress

from trainsync.checkpoint.errors import StateMismatchError
from trainsync.checkpoint.load.account import LoadedBytes
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.step_files import StepFiles
from trainsync.checkpoint.load.verify import Need, assign, verify_all
from trainsync.checkpoint.megatron_shards import MegatronShards, NotAllSavedError
from trainsync.checkpoint.memory.neighbour.fetching import bring
from trainsync.dist.agreement import Agreement


class StepShards:
    """One rank's reads of a committed step.

    Every shard file says which parts of the model it holds. Unless this rank's own file is enough,
    all of them are opened to find those that it reads. Only these are compared with the manifest;
    of a bucket, whatever is read.

    Args:
        files: of the step; the caller closes them.
        ranks: those that load.

    Attributes:
        resume: the step.
        files, ranks: see Args.
    """

    def __init__(self, resume: Resume, files: StepFiles, ranks: Agreement) -> None:
        self.resume = resume
        self.files = files
        self.ranks = ranks
        self._paths: set[str] = set()

    @property
    def bytes(self) -> LoadedBytes:
        """Those of this rank's files, which `check` has planned to read; of a bucket, what came
        from there."""
        return self.files.bytes(self._paths)

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
        bring(self.resume, lambda: own, self.files.memory, ranks, seconds)

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
            LoadTimeoutError, StoreError: the bucket was not read.
            What ``needed`` raises.
        """
        ranks = self.ranks
        if component.is_saved_by(ranks.rank, ranks.world_size):
            # In the layout that saved it mostly is enough.
            with suppress(StateMismatchError, NotAllSavedError):
                return self._open(component, {ranks.rank}, needed)
        return self._open(component, component.ranks, needed)

    def _open(
        self,
        component: Component,
        ranks: Set[int],
        needed: Callable[[MegatronShards], set[str]],
    ) -> tuple[MegatronShards, set[str]]:
        memory = self.files.memory
        opened = [component.path(rank) for rank in ranks]
        while True:
            try:
                states = self.files.glance(opened)
                shards = MegatronShards(states.__getitem__, component, ranks)
                paths = needed(shards)
            except Exception:
                if not memory.only_glanced(opened):
                    raise
                memory.find(opened)  # other bytes say anything
                continue
            before = {path: memory.glance(path) for path in paths}
            memory.find(paths)
            if all(memory.path(path) == before[path] for path in paths):
                return shards, paths

    def check(self, plan: Callable[[], set[str]], doing: str) -> None:
        """Plan on all ranks, then compare with the manifest what is read from the volume, each
        file once a host.

        Args:
            plan: returns the files that this rank reads.
            doing: the plan, for error messages.

        Raises:
            What ``plan`` raises. CorruptCheckpointError: a file differs from the manifest.
            LoadFailedError: another rank failed; names it, and its cause.
        """

        def unchecked() -> str:
            paths = plan()
            self._paths |= paths
            return json.dumps([socket.gethostname(), sorted(self.files.unchecked(paths))])

        answers = [json.loads(answer) for answer in self.ranks.do(doing, unchecked)]
        needs = [Need(host, frozenset(paths)) for host, paths in answers]
        sizes = {entry.path: entry.bytes for entry in self.resume.manifest.files}
        self.ranks.do("checking the files", lambda: self._verify(assign(needs, sizes)))

    def _verify(self, work: Sequence[Sequence[str]]) -> str:
        verify_all(self.resume, work[self.ranks.rank])
        return ""
