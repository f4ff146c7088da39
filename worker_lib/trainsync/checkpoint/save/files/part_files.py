"""The files of one part: a staged state, or what a function writes for itself."""

from collections.abc import Mapping, Sequence

from trainsync.checkpoint.save.files import writer
from trainsync.checkpoint.save.files.archive import StateArchives
from trainsync.checkpoint.save.part import Part
from trainsync.checkpoint.save.part_writer import PartWriter
from trainsync.checkpoint.save.staging.staging import Staged
from trainsync.checkpoint.shard_names import shard_file_name
from trainsync.storage import atomic
from trainsync.storage.saves.receipts import FileEntry


class PartFiles:
    """Writes ``part`` into the staging directory of ``job``'s save.

    Args:
        state: the staged copy; of a function, None.
        archives: of the states of the part's component; of a function, None.
        in_caller: a function runs in the caller's thread, and so may meet other ranks.
    """

    def __init__(
        self,
        job: PartWriter,
        part: Part,
        state: Staged | None,
        archives: StateArchives | None = None,
        *,
        in_caller: bool,
    ) -> None:
        self._job = job
        self._part = part
        self._state = state
        self._archives = archives
        self._function = None if isinstance(part.source, Mapping) else part.source
        self._own = writer.OwnFiles(job.save, job.participant, job.files, job.writer.id)
        self.is_collective = in_caller and self._function is not None

    def produce(self) -> None:
        """Run a function that may meet other ranks, which must happen whatever became of the save;
        see `trainsync.checkpoint.save.part_writer.write_job`."""
        if self.is_collective:
            self._run_function()

    def write(self) -> Sequence[FileEntry]:
        """Put everything else in place; the bytes are durable."""
        job, part = self._job, self._part
        atomic.make_directory(job.save.path)  # durable, as the monitor's records lie there, too
        if self._function is None:
            name = shard_file_name(part.shard_name, job.participant.rank, job.world_size)
            path = part.path(name)
            files = [writer.write_state(job.files, path, self._state, self._archives)]
        else:
            if not self.is_collective:
                self._run_function()
            files = writer.adopt_own(self._own, part.path)
        small = {part.path(path): data for path, data in part.attachments.items()}
        return files + writer.write_attachments(job.files, small)

    def clear(self) -> None:
        """Remove what a function left behind, as far as it can be removed."""
        if self._function is not None:
            writer.clear_own(self._own)

    def _run_function(self) -> None:
        assert self._function is not None, "only functions are run"
        writer.produce_own(self._own, self._function)
