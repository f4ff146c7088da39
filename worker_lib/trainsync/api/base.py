"""The base of every model: camelCase on the wire, snake_case in Python, unknown fields refused."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel


def format_time(value: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as Kubernetes writes ``metav1.Time``."""
    return value.strftime("%Y-%m-%dT%H:%M:%SZ")


# Lengths and counts are bounded so that the API server can bound the cost of the CEL rules.
DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
Time = Annotated[datetime, PlainSerializer(format_time, return_type=str, when_used="json")]


class Model(BaseModel):
    """A part of the resource or of the protocol."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True
    )

    def to_json_dict(self) -> dict[str, object]:
        """The wire format: camelCase keys, JSON types, fields that are None left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
