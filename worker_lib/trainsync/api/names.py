"""Names that the operator, the monitor and the library must agree on.

Attempts count job starts from 0. The cluster attempt is the attempt that made the present
RayClusters: with ``restartScope: Job`` the pods outlive an attempt. Children of a run have an owner
reference with ``controller: true`` and `LABEL_RUN`. The two field managers apply ``status`` on the
server's side; `trainsync.api.status` lists the fields of each manager.
"""

from typing import Final

GROUP: Final = "trainsync.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "TrainingRun"
PLURAL: Final = "trainingruns"
SINGULAR: Final = "trainingrun"
SHORT_NAME: Final = "tr"

MANAGER: Final = "trainsync.dev/operator"
"""Name of the operator as ``spec.managedBy`` has it."""
# A store with a prefix: two runs in one place would mix their steps.
# It is what `trainsync.storage.objects.address.parse` takes: no part is empty, '.' or '..'.
_SIGN: Final = r"[^/?#\s\x00-\x1f\x7f]"
_NO_DOT: Final = r"[^./?#\s\x00-\x1f\x7f]"
_PART: Final = rf"({_NO_DOT}{_SIGN}*|\.{_NO_DOT}{_SIGN}*|\.\.{_SIGN}+)"
BUCKET_URL_PATTERN: Final = (
    r"^(s3://[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]|gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
    rf"|az://[a-z0-9$][a-z0-9-]{{1,61}}[a-z0-9])/+{_PART}(/{_PART})*/*$"
)
ENDPOINT_PATTERN: Final = r"^https?://[^@\s]+$"
ADAPTER_PATTERN: Final = r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$"
MANAGER_PATTERN: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9._-]+$"

OPERATOR_FIELD_MANAGER: Final = "trainsync-operator"
MONITOR_FIELD_MANAGER: Final = "trainsync-monitor"

# Labels on every child; the operator's watches select on LABEL_RUN on the server.
LABEL_RUN: Final = f"{GROUP}/run"
LABEL_CLUSTER: Final = f"{GROUP}/cluster"
LABEL_GROUP: Final = f"{GROUP}/group"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
LABEL_COMPONENT: Final = f"{GROUP}/component"
LABEL_SERVER: Final = f"{GROUP}/server"
# Hash of the rendered template: a template is applied again only when the hash changes.
ANNOTATION_HASH: Final = f"{GROUP}/template-hash"
# What of the spec the pods or the job were made from: a new attempt begins when that is edited.
ANNOTATION_MADE_FROM: Final = f"{GROUP}/made-from"
# Of servers that are suspended: how many there were, where the spec does not say.
ANNOTATION_REPLICAS: Final = f"{GROUP}/replicas"
# Of servers of several nodes that are replaced one by one: how many are asked for, while there is
# one more.
ANNOTATION_SURGE_OF: Final = f"{GROUP}/surge-of"
# Of the pods of servers of several nodes: a hash of the templates that they were made from.
LABEL_TEMPLATE: Final = f"{GROUP}/template"

MONITOR_PORT: Final = 8080
AGENT_PORT: Final = 8090
DRIVER_PATTERN: Final = (
    r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
)
"""Of the function that makes a custom engine's driver."""
CHECKPOINT_MOUNT: Final = "/trainsync/checkpoints"
# Where a server and its agent share memory.
STAGING_MOUNT: Final = "/trainsync/memory"
# Where the ranks of a trainer pod keep shards in memory.
KEPT_MOUNT: Final = "/trainsync/kept"
TOKEN_DIRECTORY: Final = "/var/run/secrets/trainsync"
TOKEN_FILE: Final = f"{TOKEN_DIRECTORY}/token"
# Shared by the monitor and every GPU pod, so that both may rename each other's files on the volume.
FS_GROUP: Final = 65532

# Reason of CheckpointHealthy while a run's bucket refuses: then the monitor is not ready.
STORE_FAILING: Final = "StoreFailing"

# Ray custom resources that the operator gives each pod of a role (1 a pod), for placing actors.
RAY_RESOURCE_TRAINER: Final = "trainsync-trainer"
RAY_RESOURCE_EXPLORER: Final = "trainsync-explorer"

HEADER_ATTEMPT: Final = "X-Trainsync-Attempt"
HEADER_INCARNATION: Final = "X-Trainsync-Incarnation"

# KubeRay refuses RayJob names over 47 characters; we add "-", "-" and three digits of attempt.
MAX_RUN_AND_CLUSTER_NAME: Final = 42
# A Service's name has at most 63 characters; we add "-server-".
MAX_RUN_AND_SERVER_NAME: Final = 55
# Of servers of several nodes: a StatefulSet "RUN-server-NAME-1024" has at most 52 characters, so
# that the name of its revision fits into a label of its pods.
MAX_RUN_AND_LARGE_SERVER_NAME: Final = 39


def ray_cluster_name(run: str, cluster: str, cluster_attempt: int) -> str:
    """Name of the RayCluster made for ``cluster_attempt``."""
    return f"{run}-{cluster}-{cluster_attempt}"


def ray_job_name(run: str, cluster: str, attempt: int) -> str:
    """Name of the RayJob that runs ``attempt`` of one cluster's entrypoint."""
    return f"{run}-{cluster}-{attempt}"


def monitor_name(run: str) -> str:
    """Name of the monitor's Deployment, Service and ServiceAccount."""
    return f"{run}-monitor"


def claim_name(run: str) -> str:
    """Name of the PersistentVolumeClaim made from ``checkpoint.storage.volumeClaimTemplate``."""
    return f"{run}-checkpoints"


def monitor_url(run: str, namespace: str) -> str:
    """Address of the run's monitor inside the cluster."""
    return f"http://{monitor_name(run)}.{namespace}.svc:{MONITOR_PORT}"


def server_name(run: str, server: str) -> str:
    """Name of the Deployment or LeaderWorkerSet, Service and PodDisruptionBudget of one entry of
    spec.servers."""
    return f"{run}-server-{server}"


def server_url(run: str, namespace: str, server: str, port: int) -> str:
    """Address of one entry of spec.servers inside the cluster."""
    return f"http://{server_name(run, server)}.{namespace}.svc:{port}"


def token_audience(run_uid: str, cluster_attempt: int) -> str:
    """Audience of the ServiceAccount token in the pods of one generation of RayClusters.

    The generation is the attempt that made the RayClusters, not the attempt of the job: with
    ``restartScope: Job`` the pods, and so their tokens, outlive an attempt.
    """
    return f"{GROUP}/run/{run_uid}/{cluster_attempt}"


def servers_audience(run_uid: str) -> str:
    """Audience of the ServiceAccount token in the pods of a run's inference servers.

    Servers outlive attempts; with such a token a pod may report of its server, and do no more.
    """
    return f"{GROUP}/run/{run_uid}/servers"
