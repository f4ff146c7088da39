"""verl's list of old checkpoints, for a run whose monitor removes them."""

import logging

from trainsync.checkpoint.errors import CheckpointError

logger = logging.getLogger(__name__)


class MonitoredRetention:
    """Mixin before verl's checkpoint manager in the bases; removes no checkpoint.

    Attributes:
        max_to_keep: checkpoints that the run keeps; None keeps all.
    """

    max_to_keep: int | None = None
    previous_saved_paths: list[str]
    _warned = False

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None = None) -> None:
        """Remember a save's path in ``previous_saved_paths``.

        Warns once about a limit that differs from the run's.
        """
        self.previous_saved_paths.append(new_path)
        if max_ckpt_to_keep is None:
            return
        if max_ckpt_to_keep > 0:
            del self.previous_saved_paths[:-max_ckpt_to_keep]
        if max_ckpt_to_keep != self.max_to_keep and not self._warned:
            self._warned = True
            logger.warning(
                "verl is told to keep %d checkpoints and the run keeps %s "
                "(spec.checkpoint.maxToKeep): the run's number counts",
                max_ckpt_to_keep,
                "all" if self.max_to_keep is None else self.max_to_keep,
            )

    def ensure_checkpoint_capacity(self, max_ckpt_to_keep: int | None) -> None:
        """Does nothing: the monitor makes room after each commit."""

    def remove_previous_save_local_path(self, path: str | list[str]) -> None:
        """Raises `CheckpointError`: only the monitor removes checkpoints."""
        raise CheckpointError(
            f"{path} is not removed: committed checkpoints are removed by the run's monitor "
            "(spec.checkpoint.maxToKeep), never by a trainer"
        )
