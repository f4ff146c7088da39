"""Errors of a process that joins a run."""


class SettingsError(Exception):
    """The environment does not describe a run; names the variable."""


class JoinError(Exception):
    """This process could not claim, or join, its attempt."""
