"""What can go wrong while weights travel, by name."""


class WeightsError(Exception):
    """Base of every error of this package."""


class StaleVersionError(WeightsError):
    """An upload, or a request, for a version that is not newer than what is published."""


class InconsistentUploadError(WeightsError):
    """The parts of one version do not fit together."""


class UnknownExplorerError(WeightsError):
    """An explorer that did not register, or has left, speaks."""


class DigestMismatchError(WeightsError):
    """Bytes that arrived, or were acknowledged, are not those that were uploaded."""


class WeightsUnavailableError(WeightsError):
    """A version could not be had in time, or is gone."""


class UnsupportedWeightsError(WeightsError):
    """A state dict holds something that cannot be sent as weights."""
