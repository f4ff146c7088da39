"""How long anything in a broadcast may take."""

from dataclasses import dataclass
from typing import Final, Self

_SLOWEST_WIRE: Final = 50e6  # bytes in a second, to each explorer


@dataclass(frozen=True)
class Deadlines:
    """Seconds, all bounds. Trainer and explorers should have the same.

    Attributes:
        whole: a broadcast with all its resends (``sync.timeoutSeconds``).
        bucket: one bucket on the wire, with the time that the trainer takes to fill it. A member
            that dies without a word is noticed by the others within it.
        connect: a connection, a group of processes, an answer.
        silence: after so long without a word a member counts as lost; words come four times as
            often.
    """

    whole: float = 600.0
    bucket: float = 30.0
    connect: float = 10.0
    silence: float = 10.0

    @classmethod
    def of(cls, seconds: float, bucket_size: int) -> Self:
        """Those of a run; trainer and explorers use it.

        Args:
            seconds: ``sync.timeoutSeconds``; of the trainer, what it leaves for the broadcast.
            bucket_size: ``sync.bucketSize``, bytes. A large one has longer: twice what it takes on
                a slow wire.
        """
        # A quarter of the whole, so that the version can be sent again to the others when one
        # explorer has held up a bucket.
        bucket = max(min(cls.bucket, seconds / 4), 2 * bucket_size / _SLOWEST_WIRE)
        return cls(whole=seconds, bucket=min(bucket, seconds))

    @property
    def patience(self) -> float:
        """Seconds after which a library beneath may give up by itself: later than who calls it."""
        return 2 * self.bucket + self.connect

    def __post_init__(self) -> None:
        for name in ("whole", "bucket", "connect", "silence"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds, got {getattr(self, name)}")
        if self.whole < self.bucket:
            raise ValueError(f"whole ({self.whole:g} s) must not be less than bucket")
