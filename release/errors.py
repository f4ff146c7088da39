"""The error of this package."""


class ReleaseError(Exception):
    """Something of the release is not as it must be; one sentence says what."""
