"""Errors of dealing out data, by name."""


class DataError(Exception):
    """Base of every error of this package."""


class DataExhaustedError(DataError):
    """Nothing is left to be taken: every epoch was dealt out."""


class DataMismatchError(DataError):
    """A saved cursor does not fit the dataset, or the settings, that it is to go on with."""


class NotInFlightError(DataError):
    """An item was never taken, or was trained or given up before."""
