"""Errors of a store: each is one sentence without a secret, whatever the server sent back."""

from trainsync.storage.errors import StorageError


class StoreError(StorageError):
    """Base of the errors of a store."""


class StoreUrlError(StoreError):
    """A URL, or an option beside it, names no store that can be opened."""


class StoreRefusedError(StoreError):
    """The store answers, and refuses: credentials, region, rights, or no such bucket."""


class StoreUnavailableError(StoreError):
    """The store does not answer, or not in time; trying again later may help."""


class ConditionRefusedError(StoreUnavailableError):
    """The store says that an object is there, and has none: another writer's may be gone again."""


class ObjectMissingError(StoreError):
    """There is no object of that key."""


class ObjectExistsError(StoreError):
    """Another writer has put an object of that key, with other bytes."""


class ObjectChangedError(StoreError):
    """Another writer has replaced the object since it was read."""


class UnconditionalStoreError(StoreError):
    """The store does not honour conditional puts, so that two writers could both win."""
