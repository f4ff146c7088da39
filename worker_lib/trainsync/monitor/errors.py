"""Refusals of a monitor, as exceptions that carry the code and sentence of the refusal."""

from collections.abc import Iterator
from contextlib import contextmanager

from trainsync.storage.errors import DanglingPointerError, StorageError, UnsafePathError


class MonitorError(Exception):
    """Base; ``code`` is the `ErrorBody` code, ``status`` the HTTP status that stands for it."""

    code = "monitor_error"
    status = 500


class InvalidRequestError(MonitorError):
    """The request contradicts itself or an earlier one; sending it again will not help."""

    code = "invalid"
    status = 422


class FencedError(MonitorError):
    """The caller's attempt or incarnation is not the one in force; it must stop."""

    code = "fenced"
    status = 409


class ClaimRefusedError(FencedError):
    """Another incarnation holds the attempt, or a newer attempt is in force; the job must exit."""

    code = "claim_refused"


class NotYetError(MonitorError):
    """The attempt is newer than what the monitor can confirm; ask again."""

    code = "not_yet"
    status = 425


class NotServedError(MonitorError):
    """This monitor is of an older release, and knows no such request."""

    code = "not_served"
    status = 404


class UnauthenticatedError(MonitorError):
    """No token, or not a valid one."""

    code = "unauthenticated"
    status = 401


class ForbiddenError(MonitorError):
    """A valid token, but of another run, namespace or generation of pods."""

    code = "forbidden"
    status = 403


class TooLargeError(MonitorError):
    """The body is larger than any request needs."""

    code = "too_large"
    status = 413


class NotReadyError(MonitorError):
    """The monitor does not hold its Lease (it starts, or was cut off); ask again."""

    code = "not_ready"
    status = 503


class StorageUnavailableError(MonitorError):
    """The volume refused a write or read (full, failing); the cause is in the message."""

    code = "storage"
    status = 503


class StepLeasedError(MonitorError):
    """A reader holds what a save would replace; it is tried again when the reader is done."""

    code = "leased"
    status = 503


class TooManyWaitersError(MonitorError):
    """So many requests wait already that one more may not; ask again later."""

    code = "too_many_waiters"
    status = 429


class NoValidCheckpointError(MonitorError):
    """Something was committed, and nothing valid is left: never an excuse to start at step 0."""

    code = "no_valid_checkpoint"
    status = 410


class VerifyingError(MonitorError):
    """The checkpoint to resume from is being read in full; ask again. Says how far it is."""

    code = "verifying"
    status = 503


class ResumeLostError(MonitorError):
    """The checkpoint that this attempt resumed from is damaged: the next attempt goes on."""

    code = "resume_lost"
    status = 410


class MonitorUnavailableError(MonitorError):
    """The monitor did not answer, within the deadline and the retries."""

    code = "unavailable"
    status = 503


class ClientClosedError(MonitorError):
    """This process has closed its client of the monitor."""

    code = "client_closed"


BY_CODE: dict[str, type[MonitorError]] = {
    kind.code: kind
    for kind in (
        InvalidRequestError,
        FencedError,
        ClaimRefusedError,
        NotYetError,
        UnauthenticatedError,
        ForbiddenError,
        TooLargeError,
        NotReadyError,
        StorageUnavailableError,
        TooManyWaitersError,
        NoValidCheckpointError,
        VerifyingError,
        ResumeLostError,
    )
}


@contextmanager
def storage(doing: str) -> Iterator[None]:
    """Turn what the volume or a path refuses into a `MonitorError`."""
    try:
        yield
    except DanglingPointerError as error:
        raise NoValidCheckpointError(str(error)) from error
    except UnsafePathError as error:
        raise InvalidRequestError(str(error)) from error
    except (OSError, StorageError) as error:
        raise StorageUnavailableError(f"{doing}: {type(error).__name__}: {error}") from error
