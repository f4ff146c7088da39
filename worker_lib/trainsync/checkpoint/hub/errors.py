"""Errors of a push: each is one sentence without a secret."""

from trainsync.checkpoint.errors import CheckpointError


class ModelFilesError(CheckpointError):
    """A directory does not hold a whole model."""


class PushError(CheckpointError):
    """A model cannot be pushed; the message says what is expected."""
