"""What can go wrong when a process joins a run, by name."""


class SettingsError(Exception):
    """The environment does not describe a run; names the variable."""


class JoinError(Exception):
    """This process could not claim, or join, its attempt."""
