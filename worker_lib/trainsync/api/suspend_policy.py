"""``spec.suspendPolicy``: what a run does before it gives up its pods."""

from pydantic import Field

from trainsync.api.base import Model


class SuspendPolicy(Model):
    """What happens before a run that is suspended, or preempted by its queue, gives up its pods."""

    save_deadline_seconds: int = Field(
        default=120,
        ge=0,
        le=3600,
        description=(
            "Seconds that the trainers have to save at their present step before the pods go; 0 "
            "frees the pods at once. The pods of a run with a Kueue queue get so much more grace."
        ),
    )
