"""TrainingRun manifests for tests: valid ones, and changes that make them invalid."""

import copy
from typing import Any

Object = dict[str, Any]


def minimal(name: str = "run") -> Object:
    """The smallest manifest that the API server accepts."""
    return {
        "apiVersion": "trainsync.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": name},
        "spec": {
            "clusters": [
                {
                    "name": "main",
                    "rayVersion": "2.60.0",
                    "image": "registry.example/ray:1",
                    "entrypoint": "python -m train",
                    "groups": [{"name": "trainer", "role": "Trainer"}],
                }
            ],
            "checkpoint": {"storage": {"persistentVolumeClaim": {"claimName": "data"}}},
        },
    }


def full(name: str = "run") -> Object:
    """A manifest with every field set."""
    template = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "containers": [
                {"name": "ray", "image": "registry.example/ray:2", "env": [{"name": "A"}]},
                {"name": "side", "image": "registry.example/side:1"},
            ],
            "nodeSelector": {"gpu": "h200"},
        },
    }
    return {
        "apiVersion": "trainsync.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": name},
        "spec": {
            "suspend": True,
            "suspendPolicy": {"saveDeadlineSeconds": 300},
            "managedBy": "trainsync.dev/operator",
            "clusters": [
                {
                    "name": "main",
                    "rayVersion": "2.60.0",
                    "image": "registry.example/ray:1",
                    "entrypoint": "python -m train",
                    "runtimeEnvYAML": "env_vars: {A: b}",
                    "rayClusterOverrides": {
                        "gcsFaultToleranceOptions": {
                            "redisAddress": "redis:6379",
                            "redisUsername": {
                                "valueFrom": {"secretKeyRef": {"name": "redis", "key": "user"}}
                            },
                            "redisPassword": {
                                "valueFrom": {"secretKeyRef": {"name": "redis", "key": "word"}}
                            },
                        },
                        "headServiceAnnotations": {"a": "b"},
                        "headServiceType": "NodePort",
                    },
                    "head": {"template": template, "rayStartParams": {"num-cpus": "1"}},
                    "groups": [
                        {
                            "name": "trainer",
                            "role": "Trainer",
                            "replicas": 2,
                            "template": template,
                            "rayStartParams": {"num-gpus": "8"},
                        },
                        {"name": "explorer", "role": "Explorer", "replicas": 4},
                    ],
                },
            ],
            "explorerReplicas": 3,
            "resumeFrom": {"step": 10, "request": "again"},
            "sync": {
                "method": "nccl",
                "bucketSize": "64Mi",
                "style": "fixed",
                "interval": 2,
                "offset": 1,
                "timeoutSeconds": 60,
            },
            "checkpoint": {
                "storage": {
                    "incremental": True,
                    "volumeClaimTemplate": {
                        "storageClassName": "fast",
                        "accessModes": ["ReadWriteMany"],
                        "size": "500Gi",
                        "retentionPolicy": "Delete",
                    },
                },
                "path": "team/run-1",
                "interval": 10,
                "maxToKeep": 3,
                "saveStrategy": "single_node",
                "verify": "digest",
                "memory": {"enabled": True, "budget": "64Gi", "copies": 1},
                "mirror": {
                    "url": "s3://bucket/run",
                    "endpoint": "https://s3.example.com",
                    "region": "us-east-1",
                    "allowHttp": True,
                    "credentials": {"secretRef": {"name": "bucket-keys"}},
                    "keepLast": 5,
                    "keepEvery": 1000,
                    "uploadBytesPerSecond": "100Mi",
                },
            },
            "monitor": {
                "image": "registry.example/monitor:1",
                "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"cpu": "2"}},
                "logLevel": "debug",
                "ttlSecondsAfterFinished": 60,
                "serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:a"},
                "podLabels": {"azure.workload.identity/use": "true"},
            },
            "failurePolicy": {
                "maxRestarts": 5,
                "maxInfrastructureRestarts": 50,
                "rules": [
                    {
                        "action": "Fail",
                        "onClasses": ["Application"],
                        "onExitCodes": {
                            "containerName": "ray-worker",
                            "operator": "In",
                            "values": [42],
                        },
                        "onMessage": "bad data",
                    }
                ],
                "activeDeadlineSeconds": 86400,
                "backoffSeconds": 30,
                "restartScope": "Cluster",
                "warmSpare": True,
                "podReplacementSeconds": 120,
                "progressDeadlineSeconds": 600,
                "startupDeadlineSeconds": 900,
            },
            "ttlSecondsAfterFinished": 60,
            "deleteAfterFinishedSeconds": 86400,
        },
    }


def served(name: str = "run") -> Object:
    """A manifest with servers, with every field of theirs."""
    run = minimal(name)
    container = {"name": "vllm", "image": "registry.example/vllm:1"}
    run["spec"]["sync"] = {"method": "checkpoint"}
    run["spec"]["servers"] = [
        {
            "name": "rollout",
            "engine": "VLLM",
            "replicas": 2,
            "nodes": 1,
            "port": 9000,
            "maxStaleness": 3,
            "proof": "Required",
            "sync": {
                "pause": "abort",
                "fellows": True,
                "prepareSeconds": 60,
                "sglangRoute": "disk",
            },
            "template": {
                "metadata": {"annotations": {"a": "b"}},
                "spec": {"containers": [container], "nodeSelector": {"gpu": "h200"}},
            },
        },
        {"name": "judge", "engine": "VLLM", "template": {"spec": {"containers": [container]}}},
    ]
    return run


def adapted(name: str = "run") -> Object:
    """A manifest with servers of a LoRA adapter, whose configuration is as PEFT writes it."""
    run = served(name)
    config = {
        "peft_type": "LORA",
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {},
        "base_model_name_or_path": "models/base",
    }
    rollout, judge = run["spec"]["servers"]
    rollout["adapter"] = {"name": "team/rollout-1.0", "config": config}
    rollout["sync"]["prepareSeconds"] = 0
    # A regular expression in place of a list, and a scale that is no whole number.
    other = {**config, "target_modules": ".*_proj$", "lora_alpha": 0.5}
    judge["adapter"] = {"name": "a", "config": other}
    return run


def stored(name: str = "run") -> Object:
    """A manifest whose weights and checkpoints go through a bucket, with every field of that."""
    run = minimal(name)
    run["spec"]["checkpoint"]["storage"] = {
        "objectStore": {"url": "s3://bucket/checkpoints", "uploadBytesPerSecond": "100Mi"},
        "incremental": True,
    }
    run["spec"]["sync"] = {
        "method": "store",
        "store": {
            "url": "s3://bucket/run",
            "endpoint": "https://s3.example.com",
            "region": "us-east-1",
            "allowHttp": True,
            "credentials": {"secretRef": {"name": "bucket-keys"}},
            "readCredentials": {"secretRef": {"name": "bucket-reader"}},
        },
    }
    return run


def served_by_store(name: str = "run") -> Object:
    """A manifest with servers, and no volume."""
    run = stored(name)
    run["spec"]["servers"] = served()["spec"]["servers"]
    run["spec"]["checkpoint"]["storage"] = {"objectStore": {"url": "s3://bucket/run"}}
    return run


def changed(base: Object, path: str, value: Any) -> Object:
    """A copy with one field changed; ``path`` such as ``spec.clusters.0.name``; `...` removes the
    field."""
    result = copy.deepcopy(base)
    *way, last = path.split(".")
    place: Any = result
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    if isinstance(place, list):
        if value is ...:
            del place[int(last)]
        elif int(last) == len(place):
            place.append(value)
        else:
            place[int(last)] = value
    elif value is ...:
        del place[last]
    else:
        place[last] = value
    return result


def autoscaled(name: str = "run") -> Object:
    """A manifest whose explorers Ray's autoscaler counts, with every option."""
    run = minimal(name)
    (cluster,) = run["spec"]["clusters"]
    cluster["groups"].append(
        {
            "name": "explorer",
            "role": "Explorer",
            "replicas": 2,
            "minReplicas": 1,
            "maxReplicas": 4,
        }
    )
    cluster["rayClusterOverrides"] = {
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "idleTimeoutSeconds": 30,
            "upscalingMode": "Conservative",
            "version": "v2",
            "image": "registry.example/ray:1",
            "imagePullPolicy": "IfNotPresent",
            "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}},
        },
    }
    return run
