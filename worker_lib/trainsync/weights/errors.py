"""Errors of publishing, transporting and taking weights."""


class WeightsError(Exception):
    """Base of every error of this package."""


class StaleVersionError(WeightsError):
    """An upload, or a request, for a version that is not newer than what is published."""


class InconsistentUploadError(WeightsError):
    """The parts of one version do not fit together."""


class UnknownExplorerError(WeightsError):
    """An explorer that did not register, or has left, speaks."""


class ExplorerLostError(WeightsError):
    """An explorer speaks that was given up; it may register again."""


class ExplorerReplacedError(WeightsError):
    """Another process registered under this explorer's id; this one must end."""


class DigestMismatchError(WeightsError):
    """Bytes that arrived, or were acknowledged, are not those that were uploaded."""


class WeightsUnavailableError(WeightsError):
    """A version could not be fetched in time, or is gone."""


class WeightsLateError(WeightsUnavailableError):
    """The bytes of a published version have not come yet; they still may."""


class WeightsReplacedError(WeightsUnavailableError):
    """The bytes of a published version are gone, since a newer one is there or about to be."""


class StoreFullError(WeightsUnavailableError):
    """There is no room for a new version where it would be put."""


class NothingPublishedError(WeightsUnavailableError):
    """There is no version yet."""


class WeightsTimeoutError(WeightsUnavailableError):
    """No new version was published in time; the trainer has not stopped."""


class UnsupportedWeightsError(WeightsError):
    """A state dict holds something that cannot be sent as weights."""


class SchemaMismatchError(WeightsError):
    """The weights that are offered do not fit the model that is to take them."""


class MemberLostError(WeightsError):
    """A member of a broadcast ended, went silent, or cannot be reached."""


class GroupFailedError(WeightsError):
    """A group of processes could not be made, or a collective on it failed; it is given up."""


class SupersededTrainerError(WeightsError):
    """Newer trainers have taken over: of a newer attempt, or made in a restart in place."""


class SharedMemoryError(WeightsError):
    """Memory cannot be shared between processes of a host; the network can be used instead."""


class DeltaError(WeightsError):
    """The difference between two versions is damaged, or is not made for what is here."""
