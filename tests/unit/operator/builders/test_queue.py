"""What Kueue reads of the children."""

from typing import Any

from trainsync_operator.reconcile.run import PRIORITY_LABEL, QUEUE_LABEL

from tests.unit.operator.builders.built import built_cluster, with_cluster


def test_the_queue_of_the_run_is_that_of_its_clusters_and_suspend_is_left_to_the_queue() -> None:
    queued = built_cluster(labels={QUEUE_LABEL: "gpus"})
    assert queued["metadata"]["labels"][QUEUE_LABEL] == "gpus"
    for cluster in (queued, built_cluster()):
        assert "suspend" not in cluster["spec"]


def test_the_priority_and_the_topology_of_the_queue_are_passed_on() -> None:
    topology = {"kueue.x-k8s.io/podset-required-topology": "cloud.example/block"}
    template = {"metadata": {"annotations": topology}}
    groups = [{"name": "trainer", "role": "Trainer", "replicas": 2, "template": template}]
    labels = {QUEUE_LABEL: "gpus", PRIORITY_LABEL: "research"}
    cluster = built_cluster(with_cluster(groups=groups), labels=labels)
    assert cluster["metadata"]["labels"][PRIORITY_LABEL] == "research"
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert workers["template"]["metadata"]["annotations"] == topology


def test_pods_of_a_queue_outlive_their_preemption_until_the_save_and_others_do_not() -> None:
    def head(seconds: int, pod: dict[str, Any] | None = None, **labels: str) -> dict[str, Any]:
        run_spec = with_cluster(head={"template": {"spec": pod or {}}})
        run_spec["suspendPolicy"] = {"saveDeadlineSeconds": seconds}
        cluster = built_cluster(run_spec, labels=labels)
        found: dict[str, Any] = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        return found

    queue = {QUEUE_LABEL: "gpus"}
    for free in (head(60), head(0, **queue)):
        assert "terminationGracePeriodSeconds" not in free
        assert "lifecycle" not in free["containers"][0]
    held = head(60, {"terminationGracePeriodSeconds": 5}, **queue)
    assert held["terminationGracePeriodSeconds"] == 65
    command = held["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["python3", "-m", "trainsync.runtime.stop.hook", "60"]
    own = {"preStop": {"sleep": {"seconds": 9}}}
    theirs = head(60, {"containers": [{"name": "ray", "lifecycle": own}]}, **queue)
    assert theirs["containers"][0]["lifecycle"] == own
    assert theirs["terminationGracePeriodSeconds"] == 90
