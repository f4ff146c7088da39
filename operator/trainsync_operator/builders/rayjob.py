"""The RayJob that runs one attempt of a cluster's entrypoint."""

from functools import lru_cache
from typing import Any, Final

import yaml
from trainsync.api import env, names
from trainsync.api.failure_policy import FailurePolicy
from trainsync.api.spec import Cluster

from trainsync_operator.builders import fingerprint
from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube.kinds import RAY_CLUSTER, RAY_JOB
from trainsync_operator.reconcile.run import SpecError

# How many runs' environments are remembered: each look at a run builds its job, and yaml is slow.
_REMEMBERED: Final = 1024


@lru_cache(_REMEMBERED)
def _with_own(given: str, field: str, attempt: int, asked: tuple[tuple[str, str], ...]) -> str:
    try:
        read = yaml.safe_load(given) or {}
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a day that no month has
        # The place of the error and not its text: the line may hold a key.
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SpecError(f"{field} is not YAML{place}: correct it") from None
    if not isinstance(read, dict) or not isinstance(read.get("env_vars") or {}, dict):
        raise SpecError(
            f"{field} must be a mapping, and env_vars in it too: write 'env_vars: {{NAME: value}}'"
        )
    # These override the environment of the pod, which outlives the attempt.
    variables = {**(read.get("env_vars") or {}), env.ATTEMPT: str(attempt), **dict(asked)}
    text: str = yaml.safe_dump({**read, "env_vars": variables}, sort_keys=True)
    return text


def _asked(policy: FailurePolicy) -> tuple[tuple[str, str], ...]:
    """Variables for a job that restarts trainers in place."""
    asked = []
    if policy.warm_spare:
        asked.append((env.WARM_SPARE, "true"))
    if policy.pod_replacement_seconds:
        asked.append((env.POD_REPLACEMENT_SECONDS, str(policy.pod_replacement_seconds)))
    return tuple(asked)


def build(target: Target, cluster: Cluster, ray_cluster_uid: str) -> dict[str, Any]:
    """The RayJob of the present attempt; the cluster must have an entrypoint.

    Its controller is the RayCluster that it runs on: Kueue leaves what belongs to a workload of its
    own alone, and would suspend any other job without a queue, which KubeRay refuses with a
    ``clusterSelector``. The run owns the job too, which outlives its RayCluster to be looked at.

    Raises:
        SpecError: runtimeEnvYAML cannot be read.
    """
    run = target.run
    name = names.ray_job_name(run.name, cluster.name, target.attempt)
    ray_cluster = names.ray_cluster_name(run.name, cluster.name, target.cluster_attempt)
    field = f"spec.clusters[{cluster.name}].runtimeEnvYAML"
    spec = {
        "entrypoint": cluster.entrypoint,
        "runtimeEnvYAML": _with_own(
            cluster.runtime_env_yaml or "",
            field,
            target.attempt,
            _asked(run.spec.failure_policy),
        ),
        # RayJob and Ray job share a name, so that Ray refuses to start the job twice on one head.
        "jobId": name,
        "submissionMode": "HTTPMode",
        "clusterSelector": {"ray.io/cluster": ray_cluster},
        # The operator counts attempts, not KubeRay.
        "backoffLimit": 0,
    }
    labels = {
        names.LABEL_CLUSTER: cluster.name,
        names.LABEL_ATTEMPT: str(target.attempt),
    }
    controller = {
        "apiVersion": RAY_CLUSTER.api_version,
        "kind": RAY_CLUSTER.name,
        "name": ray_cluster,
        "uid": ray_cluster_uid,
        "controller": True,
    }
    job = child(target, RAY_JOB, name, "job", {"spec": spec}, labels, controller)
    job["metadata"]["annotations"][names.ANNOTATION_MADE_FROM] = fingerprint.of_job(cluster)
    return job
