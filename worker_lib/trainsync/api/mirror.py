"""``TrainingRun.spec.checkpoint.mirror``: the bucket that committed steps are copied to."""

from pydantic import Field

from trainsync.api.base import Model
from trainsync.api.names import ENDPOINT_PATTERN, MIRROR_URL_PATTERN


class SecretReference(Model):
    """A Secret of the run's namespace."""

    name: str = Field(min_length=1, max_length=253, description="Name of the Secret.")


class MirrorCredentials(Model):
    """What opens the bucket."""

    secret_ref: SecretReference = Field(
        description=(
            "A Secret whose keys are names of environment variables, such as AWS_ACCESS_KEY_ID; "
            "docs/storage.md has those that are passed on."
        )
    )


class Mirror(Model):
    """A bucket that the monitor copies committed steps to, behind training."""

    url: str = Field(
        min_length=1,
        max_length=768,
        pattern=MIRROR_URL_PATTERN,
        description="s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, of one run.",
    )
    endpoint: str | None = Field(
        default=None,
        max_length=512,
        pattern=ENDPOINT_PATTERN,
        description="Of a server of your own (s3, az); the cloud's when absent.",
    )
    region: str | None = Field(
        default=None, max_length=64, description="Of S3; us-east-1 when absent."
    )
    allow_http: bool = Field(
        default=False,
        description="Whether the endpoint may be http://, where others can read what goes by.",
    )
    credentials: MirrorCredentials | None = Field(
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
