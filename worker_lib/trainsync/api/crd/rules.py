"""CEL rules, list keys and printed columns of the TrainingRun in the API server.

Each rule is one CEL expression with one sentence that names the field and the remedy. Paths are
paths of the resource; ``[]`` stands for the items of a list.
"""

from dataclasses import dataclass
from typing import Final

from trainsync.api.failure_policy import MESSAGE_PATTERN
from trainsync.api.names import (
    ADAPTER_PATTERN,
    AGENT_PORT,
    BUCKET_URL_PATTERN,
    DRIVER_PATTERN,
    ENDPOINT_PATTERN,
    MANAGER_PATTERN,
    MAX_RUN_AND_CLUSTER_NAME,
    MAX_RUN_AND_LARGE_SERVER_NAME,
    MAX_RUN_AND_SERVER_NAME,
)
from trainsync.api.quantities import MEMORY_PATTERN, SIZE_PATTERN


@dataclass(frozen=True)
class Rule:
    """One entry of ``x-kubernetes-validations``."""

    rule: str
    message: str


def _template_has_images(template: str, cluster: str) -> str:
    """CEL: every container of ``template`` (which may be absent) has an image.

    The cluster's image is the default for the first container, which runs Ray.
    """
    containers = f"{template}.spec.containers"
    given = f"has({template}) && has({template}.spec) && has({containers})"
    missing = f"{containers}.filter(x, !has(x.image)).size()"
    return (
        f"({given}) ? ({missing} == 0 || (has({cluster}.image) && {missing} == 1"
        f" && !has({containers}[0].image))) : has({cluster}.image)"
    )


_QUANTITIES = (
    "self.requests.all(k, isQuantity(string(self.requests[k]))) && "
    "self.limits.all(k, isQuantity(string(self.limits[k])))"
)


def _same(source: str, *fields: str) -> str:
    """CEL: ``storage.<source>`` has the same ``fields`` as before; ``?`` marks optional ones."""
    mine, old = f"self.storage.{source}", f"oldSelf.storage.{source}"
    parts = []
    for field in fields:
        name = field.removeprefix("?")
        equal = f"{mine}.{name} == {old}.{name}"
        if name != field:
            equal = f"has({mine}.{name}) == has({old}.{name}) && (!has({mine}.{name}) || {equal})"
        parts.append(equal)
    same = " && ".join(parts)
    return f"has({mine}) == has({old}) && (!has({mine}) || ({same}))"


def _of_bucket(path: str) -> list[Rule]:
    """The rules of a place in object storage."""
    return [
        Rule(
            "!has(self.endpoint) || self.allowHttp || self.endpoint.startsWith('https://')",
            f"{path}.endpoint is plain http, where others can read and change what"
            " goes by: give an https:// one, or set allowHttp",
        ),
        Rule(
            "!has(self.endpoint) || !self.url.startsWith('gs://')",
            f"{path}.endpoint is for s3:// and az:// alone: remove it",
        ),
        Rule(
            "!has(self.region) || self.url.startsWith('s3://')",
            f"{path}.region is for s3:// alone: remove it",
        ),
        Rule(
            "self.url.matches('^[a-z0-9]+://[^/]+/.{0,512}$')",
            f"{path}.url has a prefix of more than 512 characters: give a shorter one",
        ),
    ]


def _bandwidth(path: str) -> dict[str, list[Rule]]:
    field = f"{path}.uploadBytesPerSecond"
    return {
        field: [
            Rule(
                f"isQuantity(string(self)) && (type(self) == int || self.matches('{SIZE_PATTERN}'))"
                " && quantity(string(self)).compareTo(quantity('1Mi')) >= 0",
                f"{field} must be a quantity of at least 1Mi, such as 200Mi",
            ),
        ]
    }


_TRAINERS = "c.groups.exists(g, g.role == 'Trainer')"
_EXPLORERS = "c.groups.exists(g, g.role == 'Explorer')"
_EXPLORER_GROUPS = "self.clusters.map(c, c.groups.filter(g, g.role == 'Explorer').size()).sum()"

# Each pattern of the models becomes a rule with a readable sentence.
PATTERN_MESSAGES: Final = {
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": (
        "must be lower-case letters, digits and '-', and begin and end with a letter or digit"
    ),
    r"^\S+$": "must be the reference of an image, without spaces, such as registry.example/ray:1.0",
    r"^[0-9]+\.[0-9]+\.[0-9]+$": "must be the full version of Ray in the image, such as 2.60.0",
    MESSAGE_PATTERN: (
        "must be text with '.', '.*', '|', '^', '$', classes such as [a-z] and escapes such as \\d"
        " and \\.; groups and other repetitions are refused, because matching must be quick"
    ),
    BUCKET_URL_PATTERN: (
        "must be s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, with a name that"
        " a bucket can have, without credentials, and without empty parts, '.' and '..'"
    ),
    ENDPOINT_PATTERN: "must be https://host[:port], without a user and a password",
    DRIVER_PATTERN: "must be a function of a module, such as my_package.servers:make_driver",
    ADAPTER_PATTERN: (
        "must be letters, digits, '.', '_', '-' and '/', and begin and end with a letter or digit,"
        " such as rollout"
    ),
    MANAGER_PATTERN: "must be a domain, a '/' and a name, such as kueue.x-k8s.io/multikueue",
    r"\S": "must be a command, such as 'python -m my.trainer', or be left out",
}

RULES: Final[dict[str, list[Rule]]] = {
    "": [
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must begin with a letter and hold only lower-case letters, digits and"
            " '-': choose such a name, because Services are named after it",
        ),
        Rule(
            "self.spec.clusters.all(c, size(self.metadata.name) + size(c.name) <= "
            f"{MAX_RUN_AND_CLUSTER_NAME})",
            "metadata.name and spec.clusters[].name may have at most"
            f" {MAX_RUN_AND_CLUSTER_NAME} characters together, because KubeRay limits the names"
            " made of them: shorten one of the two",
        ),
        Rule(
            "!has(self.spec.servers) || self.spec.servers.all(s, size(self.metadata.name) +"
            f" size(s.name) <= {MAX_RUN_AND_SERVER_NAME})",
            "metadata.name and spec.servers[].name may have at most"
            f" {MAX_RUN_AND_SERVER_NAME} characters together, because Services are named after"
            " them: shorten one of the two",
        ),
        Rule(
            "!has(self.spec.servers) || self.spec.servers.all(s, s.nodes == 1 ||"
            f" size(self.metadata.name) + size(s.name) <= {MAX_RUN_AND_LARGE_SERVER_NAME})",
            "metadata.name and spec.servers[].name may have at most"
            f" {MAX_RUN_AND_LARGE_SERVER_NAME} characters together where nodes is above 1, because"
            " StatefulSets are named after them: shorten one of the two",
        ),
    ],
    # The rules of spec.sync are here: the API server checks its default, {}, before filling it in.
    "spec": [
        Rule(
            "self.clusters.map(c, c.groups.filter(g, g.role == 'Trainer').size()).sum() == 1",
            "spec.clusters[].groups must hold exactly one group with role Trainer over all"
            " clusters: add the missing one, or make the others Explorer",
        ),
        Rule(
            "self.clusters.all(c, has(c.entrypoint))",
            "spec.clusters[].entrypoint must be set on each cluster: give the command that trains,"
            " or that explores where the trainers are in another cluster",
        ),
        Rule(
            f"self.sync.method != 'memory' || self.clusters.all(c, !{_EXPLORERS} || {_TRAINERS})",
            "spec.sync.method memory is for groups of roles Trainer and Explorer in one cluster,"
            " because Ray carries the weights: choose nccl, checkpoint or store, or move the groups"
            " into one of spec.clusters",
        ),
        Rule(
            f"!has(self.explorerReplicas) || {_EXPLORER_GROUPS} == 1",
            "spec.explorerReplicas is for runs with exactly one group of role Explorer: remove it,"
            " and set spec.clusters[].groups[].replicas",
        ),
        Rule(
            "!has(self.explorerReplicas) || !self.clusters.exists(c, c.groups.exists(g,"
            " has(g.maxReplicas)))",
            "spec.explorerReplicas is not for explorers that Ray's autoscaler counts (maxReplicas):"
            " remove one of the two",
        ),
        Rule(
            "!has(self.servers) || self.servers.size() == 0 || self.sync.method in ['checkpoint',"
            " 'store']",
            "spec.servers follow committed or stored weights, which needs spec.sync.method"
            " checkpoint or store: set one, or remove the servers",
        ),
        Rule(
            "!has(self.servers) || self.servers.all(s, s.nodes == 1 || self.servers.all(t,"
            " !t.name.matches('^' + s.name + '-[0-9]+$')))",
            "spec.servers[].name may not be that of an entry with nodes above 1, a '-' and a"
            " number, because LeaderWorkerSets name each server so: choose another name",
        ),
        Rule(
            "!has(self.servers) || self.servers.all(s, has(s.adapter)) || !self.servers.exists(s,"
            " has(s.adapter))",
            "spec.servers[].adapter must be set on all entries or on none, because the versions of"
            " a run are of an adapter or of whole models: set it on each, or remove it",
        ),
        Rule(
            "!has(self.checkpoint.storage.objectStore) ||"
            " !has(self.checkpoint.storage.objectStore.readCredentials) ||"
            " self.sync.method == 'checkpoint'",
            "spec.checkpoint.storage.objectStore.readCredentials is for spec.sync.method"
            " checkpoint, whose explorers read there: remove it with any other",
        ),
        Rule(
            "!has(self.checkpoint.memory) || !self.checkpoint.memory.enabled ||"
            " self.checkpoint.memory.copies == 0 || self.clusters"
            ".exists(c, c.groups.exists(g, g.role == 'Trainer' && g.replicas > 1))",
            "spec.checkpoint.memory.copies 1 keeps each shard in another trainer pod, too: ask for"
            " 2 replicas or more of the group of role Trainer, or remove copies",
        ),
        Rule(
            "!has(self.sync.bucketSize) || self.sync.method == 'nccl'",
            "spec.sync.bucketSize is for spec.sync.method nccl alone: remove it with any other",
        ),
        Rule(
            "!self.sync.delta || self.sync.method in ['memory', 'nccl']",
            "spec.sync.delta is for spec.sync.method memory and nccl, because with checkpoint"
            " explorers read whole committed files, and store has deltas of its own: remove it, or"
            " choose another method",
        ),
        Rule(
            "has(self.sync.store) == (self.sync.method == 'store')",
            "spec.sync.store is for spec.sync.method store, which needs it: set it there, and"
            " remove it with any other method",
        ),
        Rule(
            "self.sync.style == 'fixed' ? self.sync.offset <= self.sync.interval"
            " : self.sync.offset == 0",
            "spec.sync.offset must be between 0 and spec.sync.interval with style fixed, and 0 with"
            " any other style: lower it, or remove it",
        ),
        Rule(
            "has(self.sync.maxStaleness) == (self.sync.style == 'fully_async')",
            "spec.sync.maxStaleness is for style fully_async, which needs it: set it there, and"
            " remove it with any other style",
        ),
        Rule(
            "!has(self.sync.maxStaleness) || self.sync.maxStaleness >= self.sync.interval - 1",
            "spec.sync.maxStaleness must be at least spec.sync.interval - 1, because weights grow"
            " that old between two versions: raise it, or lower the interval",
        ),
        Rule(
            "self.clusters.size() == oldSelf.clusters.size() && "
            "self.clusters.all(c, oldSelf.clusters.exists(o, o.name == c.name))",
            "spec.clusters[].name is immutable, and clusters cannot be added or removed: make a new"
            " TrainingRun instead",
        ),
        Rule(
            "has(self.managedBy) == has(oldSelf.managedBy) && (!has(self.managedBy) ||"
            " self.managedBy == oldSelf.managedBy)",
            "spec.managedBy is immutable, because two controllers would look after the run: make a"
            " new TrainingRun instead",
        ),
        Rule(
            "self.suspend || self.clusters.all(c, c.groups.all(g, g.role != 'Trainer' || "
            "oldSelf.clusters.all(o, o.name != c.name || o.groups.all(p, p.name != g.name || "
            "p.replicas == g.replicas))))",
            "spec.clusters[].groups[].replicas of the Trainer group can only change while"
            " spec.suspend is true: suspend the run first, then change it and resume",
        ),
    ],
    "spec.sync.bucketSize": [
        Rule(
            f"isQuantity(string(self)) && (type(self) == int || self.matches('{SIZE_PATTERN}'))"
            " && quantity(string(self)).compareTo(quantity('1Mi')) >= 0"
            " && quantity(string(self)).compareTo(quantity('16Gi')) <= 0",
            "spec.sync.bucketSize must be a quantity from 1Mi to 16Gi, such as 512Mi",
        ),
    ],
    "spec.checkpoint.memory.budget": [
        Rule(
            f"isQuantity(string(self)) && (type(self) == int || self.matches('{MEMORY_PATTERN}'))"
            " && quantity(string(self)).compareTo(quantity('1Mi')) >= 0",
            "spec.checkpoint.memory.budget must be a quantity of at least 1Mi, such as 64Gi",
        ),
    ],
    "spec.checkpoint.mirror": _of_bucket("spec.checkpoint.mirror"),
    **_bandwidth("spec.checkpoint.mirror"),
    "spec.checkpoint.storage.objectStore": _of_bucket("spec.checkpoint.storage.objectStore"),
    **_bandwidth("spec.checkpoint.storage.objectStore"),
    "spec.sync.store": _of_bucket("spec.sync.store"),
    "spec.clusters[]": [
        Rule(
            "(has(self.rayClusterOverrides) && self.rayClusterOverrides.enableInTreeAutoscaling) =="
            " self.groups.exists(g, has(g.maxReplicas))",
            "spec.clusters[].rayClusterOverrides.enableInTreeAutoscaling goes with minReplicas and"
            " maxReplicas of a group of explorers: set both, or remove both",
        ),
        Rule(
            "self.groups.size() <= 7",
            "spec.clusters[].groups may have at most 7 entries, because Kueue takes no RayCluster"
            " with more: make one group of like ones",
        ),
        Rule(
            f"({_template_has_images('self.head.template', 'self')})",
            "spec.clusters[].image is missing while a container of head.template has no image: set"
            " the cluster's image, or one on every container of the template",
        ),
        Rule(
            f"self.groups.all(g, {_template_has_images('g.template', 'self')})",
            "spec.clusters[].image is missing while a container of groups[].template has no image:"
            " set the cluster's image, or one on every container of the template",
        ),
        Rule(
            "self.groups.size() == oldSelf.groups.size() && self.groups.all(g, "
            "oldSelf.groups.exists(o, o.name == g.name && o.role == g.role))",
            "spec.clusters[].groups[].name and role are immutable, and groups cannot be added or"
            " removed: make a new TrainingRun instead",
        ),
    ],
    "spec.clusters[].rayClusterOverrides.autoscalerOptions.resources": [
        Rule(
            _QUANTITIES,
            "spec.clusters[].rayClusterOverrides.autoscalerOptions.resources must be quantities,"
            " such as 500m or 1Gi",
        ),
    ],
    "spec.clusters[].rayClusterOverrides": [
        Rule(
            "!has(self.autoscalerOptions) || self.enableInTreeAutoscaling",
            "spec.clusters[].rayClusterOverrides.autoscalerOptions is for"
            " enableInTreeAutoscaling: true: set that, or remove the options",
        ),
    ],
    "spec.clusters[].groups[]": [
        Rule(
            "has(self.minReplicas) == has(self.maxReplicas)",
            "spec.clusters[].groups[].minReplicas and maxReplicas go together: set both, or remove"
            " both",
        ),
        Rule(
            "!has(self.maxReplicas) || self.role == 'Explorer'",
            "spec.clusters[].groups[].maxReplicas is for role Explorer, because the trainers'"
            " number is fixed for an attempt: remove it",
        ),
        Rule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || (self.minReplicas <="
            " self.replicas && self.replicas <= self.maxReplicas)",
            "spec.clusters[].groups[].replicas must be between minReplicas and maxReplicas: change"
            " one of the three",
        ),
        Rule(
            "self.name != 'headgroup' && self.name != 'head'",
            "spec.clusters[].groups[].name headgroup is KubeRay's name for the head, and head is"
            " Kueue's: choose another",
        ),
    ],
    "spec.servers[]": [
        Rule(
            f"self.port != {AGENT_PORT}",
            f"spec.servers[].port {AGENT_PORT} is the agent's: let the server listen on another",
        ),
        Rule(
            "has(self.driver) == (self.engine == 'Custom')",
            "spec.servers[].driver is for engine Custom, which needs one: set it there alone",
        ),
        Rule(
            "self.engine != 'SGLang' || self.sync.pause != 'wait'",
            "spec.servers[].sync.pause wait is not for SGLang, which cannot wait for requests while"
            " it holds others back: choose keep or abort",
        ),
        Rule(
            "self.nodes == 1 || self.engine == 'VLLM'",
            "spec.servers[].nodes above 1 is for engine VLLM alone: set it to 1",
        ),
        Rule(
            "self.sync.prepareSeconds == 0 || self.engine == 'VLLM'",
            "spec.servers[].sync.prepareSeconds is for engine VLLM alone: set it to 0",
        ),
        Rule(
            "self.sync.sglangRoute == 'disk' || self.engine == 'SGLang'",
            "spec.servers[].sync.sglangRoute is for engine SGLang alone: set it to disk",
        ),
        Rule(
            "!has(self.adapter) || self.engine == 'VLLM'",
            "spec.servers[].adapter is for engine VLLM alone: remove it, and save whole models",
        ),
        Rule(
            "!has(self.adapter) || self.nodes == 1",
            "spec.servers[].adapter is for servers of one node: set nodes to 1, or remove the"
            " adapter",
        ),
        Rule(
            "!has(self.adapter) || self.sync.prepareSeconds == 0",
            "spec.servers[].sync.prepareSeconds is for whole models: set it to 0 beside an adapter",
        ),
        Rule(
            "(self.nodes == 1) == (oldSelf.nodes == 1)",
            "spec.servers[].nodes cannot change between 1 and more, because Deployments do not"
            " become LeaderWorkerSets: add an entry of another name, and remove this one",
        ),
    ],
    "spec.failurePolicy.rules[]": [
        Rule(
            "has(self.onClasses) || has(self.onExitCodes) || has(self.onMessage)",
            "spec.failurePolicy.rules[] must have one of onClasses, onExitCodes and onMessage: say"
            " which failures the rule is for",
        ),
    ],
    "spec.failurePolicy.rules[].onMessage": [
        Rule(
            "'x'.matches(self) in [true, false]",
            "spec.failurePolicy.rules[].onMessage must be a regular expression, such as"
            " 'CUDA error.*uncorrectable'",
        ),
    ],
    "spec.monitor.resources": [
        Rule(
            _QUANTITIES,
            "spec.monitor.resources.requests and limits must be quantities, such as 500m or 1Gi",
        ),
    ],
    "spec.checkpoint": [
        Rule(
            _same("persistentVolumeClaim", "claimName")
            + " && "
            + _same("volumeClaimTemplate", "size", "accessModes", "?storageClassName")
            + " && "
            + _same("objectStore", "url", "?endpoint"),
            "spec.checkpoint.storage is immutable, because checkpoints do not move: make a new"
            " TrainingRun instead",
        ),
        Rule(
            "!has(self.storage.objectStore) || !(has(self.path) || has(self.mirror))",
            "spec.checkpoint.path and mirror need a volume, and storage.objectStore has none:"
            " remove them (the prefix is in its url)",
        ),
        Rule(
            "has(self.path) == has(oldSelf.path) && (!has(self.path) || self.path == oldSelf.path)",
            "spec.checkpoint.path is immutable, because checkpoints do not move: make a new"
            " TrainingRun instead",
        ),
    ],
    "spec.checkpoint.storage": [
        Rule(
            "[has(self.persistentVolumeClaim), has(self.volumeClaimTemplate),"
            " has(self.objectStore)].filter(given, given).size() == 1",
            "spec.checkpoint.storage must hold exactly one of persistentVolumeClaim,"
            " volumeClaimTemplate and objectStore: set the one and remove the others",
        ),
    ],
    "spec.checkpoint.storage.volumeClaimTemplate.size": [
        Rule(
            "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",
            "spec.checkpoint.storage.volumeClaimTemplate.size must be a quantity above zero,"
            " such as 500Gi",
        ),
    ],
    "spec.checkpoint.path": [
        Rule(
            "!self.startsWith('/')",
            "spec.checkpoint.path must be relative to the volume: remove the leading '/'",
        ),
        Rule(
            "!self.split('/').exists(s, s == '..' || s == '.')",
            "spec.checkpoint.path must stay inside the volume: remove the '.' and '..' segments",
        ),
        Rule(
            "self.startsWith('/') || self.matches('^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$')",
            "spec.checkpoint.path must be segments of letters, digits, '.', '_' and '-' joined by"
            " single '/', such as team/run-1",
        ),
        Rule(
            "!self.split('/')[0].startsWith('.')",
            "spec.checkpoint.path must not begin with '.', which is kept for the monitor: choose"
            " another name",
        ),
    ],
}

LIST_KEYS: Final = {
    "spec.clusters": "name",
    "spec.clusters[].groups": "name",
    "spec.servers": "name",
    "status.conditions": "type",
    "status.clusters": "name",
    "status.servers": "name",
    "status.weights.explorers": "id",
}

# (name, type, JSON path, shown only in wide output)
COLUMNS: Final = [
    ("Phase", "string", ".status.phase", False),
    ("Step", "integer", ".status.progress.step", False),
    ("Total", "integer", ".status.progress.totalSteps", False),
    ("Checkpoint", "integer", ".status.checkpoint.lastCommitted.step", False),
    ("Weights", "integer", ".status.weights.trainerVersion", False),
    ("Lag", "integer", ".status.weights.lag", False),
    ("Restarts", "integer", ".status.restarts", False),
    ("Problem", "string", ".status.problem", False),
    ("Infrastructure-Restarts", "integer", ".status.infrastructureRestarts", True),
    ("Clusters", "string", ".status.readyClusters", True),
    ("Servers", "string", ".status.readyServers", True),
    ("Monitor", "boolean", ".status.monitor.ready", True),
    ("Message", "string", '.status.conditions[?(@.type=="Ready")].message', True),
    ("Age", "date", ".metadata.creationTimestamp", False),
]
