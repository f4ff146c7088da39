"""A place in object storage, as fields of the TrainingRun name it; pods get keys of its Secret."""

from collections.abc import Mapping
from typing import Final

from pydantic import Field

from trainsync.api.base import Model
from trainsync.api.names import BUCKET_URL_PATTERN, ENDPOINT_PATTERN

CREDENTIALS: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_CLIENT_ID",
        "AZURE_TENANT_ID",
        "AZURE_CLIENT_SECRET",
    ),
}
"""Keys that the Secret of a bucket may have, by the URL's scheme: no other reaches a process."""


class SecretReference(Model):
    """A Secret of the run's namespace."""

    name: str = Field(min_length=1, max_length=253, description="Name of the Secret.")


class BucketCredentials(Model):
    """What opens the bucket."""

    secret_ref: SecretReference = Field(
        description=(
            "A Secret whose keys are names of variables, such as AWS_ACCESS_KEY_ID; "
            "docs/storage.md has them."
        )
    )


class BucketPlace(Model):
    """A prefix of a bucket, and how to reach it."""

    url: str = Field(
        min_length=1,
        max_length=768,
        pattern=BUCKET_URL_PATTERN,
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

    @property
    def scheme(self) -> str:
        """Of the URL: ``s3``, ``gs`` or ``az``."""
        return self.url.partition(":")[0]
