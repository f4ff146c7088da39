"""What of KubeRay's RayCluster a user writes: flags, pod templates, and overrides.

Every field of ``rayClusterOverrides`` is one of KubeRay's, by its name, and is passed on; the API
server refuses all others.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from trainsync.api.base import Model
from trainsync.api.pods import template_schema
from trainsync.api.quantities import Resources

StartParams = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    Field(max_length=64, description="Flags of `ray start` without the dashes, as KubeRay."),
]
PodTemplate = Annotated[
    dict[str, Any],
    WithJsonSchema(template_schema("Ray runs in the first", "the cluster's image when absent")),
]
Text = Annotated[str, Field(max_length=512)]


class UpscalingMode(StrEnum):
    """How fast Ray's autoscaler adds pods."""

    DEFAULT = "Default"
    AGGRESSIVE = "Aggressive"
    CONSERVATIVE = "Conservative"


class AutoscalerVersion(StrEnum):
    """Which of Ray's autoscalers runs."""

    V1 = "v1"
    V2 = "v2"


class PullPolicy(StrEnum):
    """When an image is pulled."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ServiceType(StrEnum):
    """How the Service of the head is reached."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class AutoscalerOptions(Model):
    """Ray's autoscaler, a container beside the head."""

    idle_timeout_seconds: int | None = Field(
        default=None,
        ge=0,
        description="Seconds after which an idle pod goes; Ray's 60 when absent.",
    )
    upscaling_mode: UpscalingMode | None = Field(
        default=None, description="Ray's Default when absent."
    )
    version: AutoscalerVersion | None = Field(
        default=None, description="The one of the version of Ray when absent."
    )
    image: str | None = Field(
        default=None,
        pattern=r"^\S+$",
        max_length=512,
        description="Image of the autoscaler; the head's when absent.",
    )
    image_pull_policy: PullPolicy | None = Field(
        default=None, description="KubeRay's choice when absent."
    )
    resources: Resources | None = Field(
        default=None, description="Of the autoscaler's container; KubeRay's when absent."
    )


class SecretKey(Model):
    """A key of a Secret in the run's namespace."""

    name: str = Field(max_length=253, description="Name of the Secret.")
    key: str = Field(max_length=253, description="Key in the Secret.")


class SecretSource(Model):
    """Where a credential comes from."""

    secret_key_ref: SecretKey


class RedisCredential(Model):
    """A credential of Redis; never written into the run itself."""

    value_from: SecretSource


class GcsFaultToleranceOptions(Model):
    """Where the head keeps its state, so that it outlives the head's processes."""

    redis_address: str = Field(
        min_length=1, max_length=512, description="Address of Redis, such as redis:6379."
    )
    redis_username: RedisCredential | None = None
    redis_password: RedisCredential | None = None


class RayClusterOverrides(Model):
    """Fields of KubeRay's RayCluster that the operator does not set itself."""

    enable_in_tree_autoscaling: bool = Field(
        default=False,
        description=(
            "Ray's autoscaler adds and removes pods of groups of explorers with minReplicas and "
            "maxReplicas, as your job asks for them."
        ),
    )
    autoscaler_options: AutoscalerOptions | None = None
    gcs_fault_tolerance_options: GcsFaultToleranceOptions | None = None
    head_service_annotations: dict[str, Text] = Field(
        default_factory=dict,
        max_length=64,
        description="Annotations of the Service of the head.",
    )
    head_service_type: ServiceType | None = Field(
        default=None, description="Type of the Service of the head; ClusterIP when absent."
    )
