"""``TrainingRun.spec.servers``: inference servers that follow the run's weights."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from trainsync.api.base import DnsLabel, Model
from trainsync.api.names import ADAPTER_PATTERN, DRIVER_PATTERN
from trainsync.api.pods import template_schema

ServerTemplate = Annotated[
    dict[str, Any],
    WithJsonSchema(
        template_schema(
            "the server is the first",
            "the agent takes that of the first container",
            required={
                "template": ["spec"],
                "spec": ["containers"],
                "container": ["name", "image"],
            },
        )
    ),
]


AdapterConfig = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            # PEFT writes about forty, also those that are null.
            "maxProperties": 128,
            # vLLM takes no adapter without them. The last is a list or a text.
            "required": ["peft_type", "r", "lora_alpha", "target_modules"],
            "properties": {
                "peft_type": {
                    "type": "string",
                    "enum": ["LORA"],
                    "description": "PEFT's name of the kind of adapter.",
                },
                "r": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 4096,
                    "description": "Rank of its layers.",
                },
                "lora_alpha": {
                    "type": "number",
                    "description": "By this, divided by r, vLLM scales what layers add.",
                },
            },
        }
    ),
]


class Engine(StrEnum):
    """The server's program, which the agent speaks to."""

    VLLM = "VLLM"
    SGLANG = "SGLang"
    CUSTOM = "Custom"


class PauseMode(StrEnum):
    """What becomes of running requests while a server takes a version: they go on with the new
    weights (keep), end first (wait), or are ended (abort)."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class SGLangRoute(StrEnum):
    """How a version comes to SGLang: as files in shared memory (disk), as tensors in /dev/shm, one
    bucket at a time (tensor), or by broadcasts in a process group (distributed)."""

    DISK = "disk"
    TENSOR = "tensor"
    DISTRIBUTED = "distributed"


class ProofPolicy(StrEnum):
    """Whether versions that were saved without a proof are taken (IfPresent) or not (Required)."""

    IF_PRESENT = "IfPresent"
    REQUIRED = "Required"


class ServerSync(Model):
    """How a server takes a version."""

    pause: PauseMode = PauseMode.KEEP
    fellows: bool = Field(
        default=False,
        description=(
            "Whether agents pass versions on to one another, so that one of them alone reads all "
            "of it from the volume or the bucket."
        ),
    )
    prepare_seconds: int = Field(
        default=0,
        ge=0,
        le=3600,
        description=(
            "Seconds in which vLLM on a CPU may load and pack a version beside the one that it "
            "serves, so that the pause only replaces weights; each worker needs memory for a "
            "second copy meanwhile. 0: nothing is prepared."
        ),
    )
    sglang_route: SGLangRoute = SGLangRoute.DISK


class Adapter(Model):
    """A LoRA adapter that follows the run; the base model stays as the server was started."""

    name: str = Field(
        pattern=ADAPTER_PATTERN,
        max_length=128,
        description="Name by which requests ask for the adapter; the base model has another.",
    )
    config: AdapterConfig = Field(
        description=(
            "The adapter_config.json that PEFT saves beside the trained adapter, the same for all "
            "versions: peft_type, r, lora_alpha, target_modules, and what else it has."
        )
    )


class Server(Model):
    """A Deployment of like inference servers, each with its agent, behind a Service; of several
    nodes each: a LeaderWorkerSet."""

    name: DnsLabel = Field(
        description="Name of the servers, unique in the run; their Service is RUN-server-NAME."
    )
    engine: Engine
    driver: str | None = Field(
        default=None,
        pattern=DRIVER_PATTERN,
        max_length=253,
        description=(
            "Of engine Custom: the function in the agent's image that makes the driver of the "
            "server, as package.module:function; absent with the others."
        ),
    )
    replicas: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description=(
            "Servers; when absent, 1 to begin with, and then what `kubectl scale deployment` (or "
            "lws, of several nodes) or a HorizontalPodAutoscaler says."
        ),
    )
    nodes: int = Field(
        default=1,
        ge=1,
        le=64,
        description=(
            "Pods of one server, over which vLLM spreads its engine; with more than 1 the servers "
            "are a LeaderWorkerSet, and --nnodes, --node-rank and --master-addr are appended to "
            "the arguments of the first container."
        ),
    )
    template: ServerTemplate = Field(
        description=(
            "Pod template; the first container is the server. An init container called "
            "trainsync-agent adds to the agent's: its resources, image, args or env."
        )
    )
    port: int = Field(
        default=8000,
        ge=1,
        le=65535,
        description="Port that the server listens on, and that of its Service.",
    )
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Training steps that a ready server may be behind the newest version; "
            "sync.maxStaleness, else sync.interval, when absent."
        ),
    )
    sync: ServerSync = Field(default_factory=ServerSync)
    proof: ProofPolicy = ProofPolicy.IF_PRESENT
    adapter: Adapter | None = Field(
        default=None,
        description=(
            "LoRA adapter of vLLM that follows the run, whose versions are saved with "
            "lora='adapter'; when absent, versions are of the whole model."
        ),
    )
