"""``TrainingRun.spec.checkpoint.mirror``: the bucket that committed steps are copied to."""

from pydantic import Field

from trainsync.api.bucket import BucketCredentials, BucketPlace
from trainsync.api.quantities import Quantity


class Mirror(BucketPlace):
    """A bucket that the monitor copies committed steps to, behind training."""

    credentials: BucketCredentials | None = Field(
        default=None,
        description="The identity of the monitor's ServiceAccount (RUN-monitor) when absent.",
    )
    keep_last: int = Field(
        default=3, ge=1, le=1000, description="Newest steps that stay in the bucket."
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Multiples of so many steps are copied, even if newer ones wait, and stay for ever; "
            "none when absent."
        ),
    )
    upload_bytes_per_second: Quantity | None = Field(
        default=None,
        description=(
            "Most bytes a second that the monitor uploads, a quantity of at least 1Mi such as "
            "200Mi; as fast as it goes when absent."
        ),
    )
