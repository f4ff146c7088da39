"""Why ranks did not go on together, by name."""


class PeerError(Exception):
    """Another rank could not do its part, or is gone; the message says which, and why."""


class PeerLostError(PeerError):
    """Another rank has ended, or its process does not run; the message names it."""
