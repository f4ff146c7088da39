"""A run's RayCluster: groups, resources, templates, overrides, autoscaling."""

import copy
import json
from typing import Any

import pytest
from trainsync.api import names
from trainsync.api.env import (
    ATTEMPT,
)
from trainsync_operator.builders import (
    fingerprint,
    raycluster,
    rayjob,
)
from trainsync_operator.builders.target import MonitorSettings, Target
from trainsync_operator.reconcile.run import SpecError, parse

from tests.unit.operator.builders.built import (
    built_cluster,
    built_job,
    env_of,
    target,
    trainer_pod,
    with_cluster,
)
from tests.unit.operator.support import make_run, raw_run, spec


def test_clusters_are_named_after_the_cluster_attempt_and_jobs_after_the_attempt() -> None:
    assert built_cluster()["metadata"]["name"] == "tiny-main-5"
    job = built_job()
    assert job["metadata"]["name"] == "tiny-main-7"
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": "tiny-main-5"}


def test_names_at_the_limit_fit_into_what_kuberay_allows() -> None:
    longest = parse(raw_run(with_cluster(name="c" * 20), name="r" * 22))
    chosen = Target(longest, 999, 999, MonitorSettings("m"))
    for obj in (
        rayjob.build(chosen, longest.spec.clusters[0], "uid-ray"),
        raycluster.build(chosen, longest.spec.clusters[0]),
    ):
        assert len(obj["metadata"]["name"]) <= 47


def test_every_group_has_exactly_its_replicas_and_its_roles_resource() -> None:
    trainer, explorer = built_cluster()["spec"]["workerGroupSpecs"]
    assert trainer["replicas"] == trainer["minReplicas"] == trainer["maxReplicas"] == 2
    for group, resource in ((trainer, "trainsync-trainer"), (explorer, "trainsync-explorer")):
        quoted = group["rayStartParams"]["resources"]
        assert json.loads(json.loads(quoted)) == {resource: 1}


@pytest.mark.parametrize("given", ['"{\\"gpu\\": 2}"', '{"gpu": 2}', "'{\"gpu\": 2}'"])
def test_resources_that_the_user_gave_are_kept(given: str) -> None:
    changed = spec()
    changed["clusters"][0]["groups"][0]["rayStartParams"] = {"resources": given, "num-cpus": "3"}
    params = built_cluster(changed)["spec"]["workerGroupSpecs"][0]["rayStartParams"]
    assert json.loads(json.loads(params["resources"])) == {"gpu": 2, "trainsync-trainer": 1}
    assert params["num-cpus"] == "3"


@pytest.mark.parametrize("given", ["{gpu: 2", "[1]", "7"])
def test_resources_that_are_no_mapping_are_refused_with_the_field(given: str) -> None:
    changed = spec()
    changed["clusters"][0]["groups"][0]["rayStartParams"] = {"resources": given}
    with pytest.raises(SpecError, match=r"groups\[trainer\].rayStartParams.resources"):
        built_cluster(changed)


def test_the_head_has_no_cpus_unless_the_user_says_so() -> None:
    assert built_cluster()["spec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    given = built_cluster(with_cluster(head={"rayStartParams": {"num-cpus": "2"}}))
    assert given["spec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "2"}


def test_a_templates_own_period_of_ray_is_kept() -> None:
    own = {"name": "RAY_free_objects_period_milliseconds", "value": "500"}
    changed = spec()
    changed["clusters"][0]["groups"][0]["template"] = {
        "spec": {"containers": [{"name": "ray-worker", "env": [own]}]}
    }
    assert env_of(trainer_pod(built_cluster(changed)))[own["name"]] == "500"


NODE_LOST = [
    {
        "key": f"node.kubernetes.io/{state}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 30,
    }
    for state in ("not-ready", "unreachable")
]


OWN = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 600}
GPU = {"key": "nvidia.com/gpu", "operator": "Exists"}


@pytest.mark.parametrize(
    ("given", "built"),
    [
        (None, NODE_LOST),
        ([GPU], [GPU, *NODE_LOST]),
        ([OWN], [OWN, NODE_LOST[1]]),
        ([{"operator": "Exists"}], [{"operator": "Exists"}]),  # of all taints
        ([{**OWN, "effect": "NoSchedule"}], [{**OWN, "effect": "NoSchedule"}, *NODE_LOST]),
    ],
)
def test_pods_leave_a_lost_node_after_30_s_unless_their_template_says_otherwise(
    given: list[dict[str, Any]] | None, built: list[dict[str, Any]]
) -> None:
    changed = spec()
    if given is not None:
        changed["clusters"][0]["groups"][0]["template"] = {"spec": {"tolerations": given}}
    assert trainer_pod(built_cluster(changed))["tolerations"] == built


def test_a_users_template_is_kept_and_gives_way_only_where_names_clash() -> None:
    template = {
        "metadata": {"labels": {"team": "x", names.LABEL_RUN: "forged"}},
        "spec": {
            "restartPolicy": "Always",
            "securityContext": {"fsGroup": 1, "runAsUser": 2},
            "nodeSelector": {"gpu": "h200"},
            "containers": [
                {
                    "name": "ray",
                    "image": "own:1",
                    "env": [{"name": "A", "value": "1"}, {"name": ATTEMPT, "value": "99"}],
                    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                },
                {"name": "side", "image": "side:1"},
            ],
            "volumes": [{"name": "v", "emptyDir": {}}],
        },
    }
    changed = spec()
    changed["clusters"][0]["groups"][0]["template"] = template
    built = built_cluster(changed)["spec"]["workerGroupSpecs"][0]["template"]
    pod, labels = built["spec"], built["metadata"]["labels"]
    assert labels["team"] == "x"
    assert labels[names.LABEL_RUN] == "tiny"
    assert pod["nodeSelector"] == {"gpu": "h200"}
    assert pod["restartPolicy"] == "Never"
    assert pod["securityContext"] == {
        "fsGroup": 1,
        "runAsUser": 2,
        "supplementalGroups": [65532],
    }
    ray, side = pod["containers"]
    assert ray["image"] == "own:1"
    assert [e["value"] for e in ray["env"] if e["name"] == ATTEMPT] == ["5"]
    assert {"name": "RAY_free_objects_period_milliseconds", "value": "10"} in ray["env"]
    assert {"name": "A", "value": "1"} in ray["env"]
    assert {"name": "v", "mountPath": "/v"} in ray["volumeMounts"]
    assert side == {"name": "side", "image": "side:1"}
    assert changed["clusters"][0]["groups"][0]["template"] == template, "the spec is not touched"


def test_the_clusters_image_serves_where_a_template_has_none() -> None:
    assert trainer_pod(built_cluster())["containers"][0]["image"] == "ray:1"


def test_the_hash_changes_with_what_is_built_and_only_then() -> None:
    def digest(run_spec: dict[str, Any]) -> str:
        found: str = built_cluster(run_spec)["metadata"]["annotations"][names.ANNOTATION_HASH]
        return found

    assert digest(spec()) == digest(spec())
    assert digest(spec()) != digest(with_cluster(image="ray:2"))


def test_scaled_explorers_have_the_runs_count_and_are_no_edit_of_the_pods() -> None:
    run, scaled = make_run(), make_run(spec(explorerReplicas=5))
    groups = built_cluster(spec(explorerReplicas=5))["spec"]["workerGroupSpecs"]
    counts = {group["groupName"]: group["replicas"] for group in groups}
    assert counts == {"trainer": 2, "explorer": 5}
    assert [group["maxReplicas"] for group in groups] == [2, 5]
    before, after = (fingerprint.of_pods(r.spec, r.spec.clusters[0]) for r in (run, scaled))
    assert before == after


def test_labels_for_batch_schedulers_go_on_to_the_ray_cluster_and_no_others() -> None:
    wanted = {"ray.io/gang-scheduling-enabled": "true", "yunikorn.apache.org/queue": "root.rl"}
    plain, labelled = built_cluster(), built_cluster(labels={**wanted, "team": "rl"})
    added = labelled["metadata"]["labels"].items() - plain["metadata"]["labels"].items()
    assert dict(added) == wanted
    assert plain["metadata"]["annotations"] != labelled["metadata"]["annotations"]
    made_from = names.ANNOTATION_MADE_FROM
    before, after = (ray["metadata"]["annotations"][made_from] for ray in (plain, labelled))
    assert before == after, "pods that run do not change"


def test_what_a_scheduler_reads_in_a_template_reaches_the_pods() -> None:
    metadata = {
        "labels": {"scheduling.x-k8s.io/pod-group": "mine"},
        "annotations": {"scheduling.k8s.io/group-name": "mine"},
    }
    template = {"metadata": metadata, "spec": {"schedulerName": "volcano"}}
    group = {"name": "trainer", "role": "Trainer", "template": template}
    ray = built_cluster(with_cluster(head={"template": template}, groups=[group]))
    for made in (ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]):
        pod = made["template"]
        assert pod["metadata"]["labels"].items() >= metadata["labels"].items()
        assert pod["metadata"]["annotations"] == metadata["annotations"]
        assert pod["spec"]["schedulerName"] == "volcano"


AUTOSCALED = {
    "rayClusterOverrides": {
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"idleTimeoutSeconds": 30, "version": "v2"},
    },
    "groups": [
        {"name": "trainer", "role": "Trainer", "replicas": 2},
        {
            "name": "explorer",
            "role": "Explorer",
            "replicas": 2,
            "minReplicas": 1,
            "maxReplicas": 4,
        },
    ],
}


def test_overrides_reach_the_ray_cluster_under_kuberays_names() -> None:
    secret = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}
    overrides = {
        "gcsFaultToleranceOptions": {"redisAddress": "redis:6379", "redisPassword": secret},
        "headServiceAnnotations": {"a": "b"},
        "headServiceType": "NodePort",
    }
    ray = built_cluster(with_cluster(rayClusterOverrides=overrides))["spec"]
    assert ray["gcsFaultToleranceOptions"] == overrides["gcsFaultToleranceOptions"]
    assert ray["headServiceAnnotations"] == {"a": "b"}
    assert ray["headGroupSpec"]["serviceType"] == "NodePort"
    assert "headServiceType" not in ray
    assert "autoscalerOptions" not in ray


def test_what_rays_autoscaler_wrote_stays_and_the_trainers_number_is_fixed() -> None:
    chosen = target(with_cluster(**AUTOSCALED))
    cluster = chosen.run.spec.clusters[0]
    fresh = raycluster.build(chosen, cluster)
    assert fresh["spec"]["enableInTreeAutoscaling"] is True
    assert fresh["spec"]["autoscalerOptions"] == {"idleTimeoutSeconds": 30, "version": "v2"}
    bounds = [
        (g["replicas"], g["minReplicas"], g["maxReplicas"])
        for g in fresh["spec"]["workerGroupSpecs"]
    ]
    assert bounds == [(2, 2, 2), (2, 1, 4)]
    live = copy.deepcopy(fresh)
    strategy = {"workersToDelete": ["tiny-main-5-explorer-worker-x"]}
    live["spec"]["workerGroupSpecs"][1] |= {"replicas": 4, "scaleStrategy": strategy}
    live["spec"]["workerGroupSpecs"][0]["replicas"] = 3  # by hand: it is put right
    again = raycluster.build(chosen, cluster, live)
    trainers, explorers = again["spec"]["workerGroupSpecs"]
    assert (explorers["replicas"], explorers["scaleStrategy"]) == (4, strategy)
    assert trainers["replicas"] == 2
    assert again["metadata"] == fresh["metadata"], "nothing to apply"


def test_bounds_of_the_autoscaler_are_no_edit_of_the_pods_and_overrides_are() -> None:
    def made(**changes: Any) -> str:
        run = make_run(with_cluster(**changes))
        return fingerprint.of_pods(run.spec, run.spec.clusters[0])

    wider = copy.deepcopy(AUTOSCALED)
    wider["groups"][1]["maxReplicas"] = 9  # type: ignore[index]
    assert made(**AUTOSCALED) == made(**wider)
    assert made() != made(rayClusterOverrides={"headServiceType": "NodePort"})
