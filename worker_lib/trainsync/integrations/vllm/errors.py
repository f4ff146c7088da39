"""Reasons why a version is not prepared; the server serves its weights from before."""


class UnpreparableError(Exception):
    """The weights can only be loaded while the server is paused."""


class NoRoomError(Exception):
    """There is not enough memory for a second copy of the weights."""


class AbandonedError(Exception):
    """The version is not wanted any more."""
