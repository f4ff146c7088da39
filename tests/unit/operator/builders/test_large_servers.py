"""The children built for an entry of spec.servers whose servers have several nodes."""

import copy
import re
from typing import Any

import pytest
from trainsync.agent.settings import read_settings
from trainsync.api import env, names
from trainsync_operator.builders.servers import budget, leader_worker_set, service
from trainsync_operator.builders.servers.hosts import LABEL_RANK
from trainsync_operator.builders.target import MonitorSettings, Target
from trainsync_operator.reconcile.run import SpecError

from tests.unit.operator.support import make_run, with_servers

Object = dict[str, Any]
SERVE = ["vllm", "serve", "/model"]
# As LWS puts it into each container of a group, before what the template has.
OF_LWS = {"LWS_LEADER_ADDRESS": "tiny-server-rollout-1.tiny-server-rollout-1.team"}


def target(entry: Object | None = None, **container: Any) -> Target:
    first = {"name": "vllm", "image": "vllm:1", "command": SERVE, **container}
    template = {"spec": {"containers": [first]}}
    given = {"name": "rollout", "nodes": 3, "template": template, **(entry or {})}
    return Target(make_run(with_servers(given)), 7, 5, MonitorSettings("monitor:1"))


def built(
    entry: Object | None = None, live: Object | None = None, *, image: str = "vllm:1", **more: Any
) -> Object:
    chosen = target(entry, image=image)
    return leader_worker_set.build(chosen, chosen.run.servers[0], live, **more)


def pods(made: Object) -> tuple[Object, Object]:
    """The pod templates of the first node of a server, and of the others."""
    template = made["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


def agent_of(pod: Object) -> Object:
    (found,) = pod["spec"]["initContainers"]
    return dict(found)


def variables(container: Object, pod_name: str) -> dict[str, str]:
    """The environment as a kubelet makes it: what is named was set before."""
    found = {**OF_LWS}
    for entry in container["env"]:
        given = pod_name if entry["name"] == env.POD_NAME else entry.get("value", "10.0.0.1")
        found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found[m[1]], given)
    return found


def test_each_node_of_a_server_is_told_its_rank_and_all_but_the_first_have_no_endpoint() -> None:
    leader, worker = (pod["spec"]["containers"][0] for pod in pods(built()))
    joined = [
        "--nnodes", "3", "--node-rank", "$(LWS_WORKER_INDEX)",
        "--master-addr", "$(LWS_LEADER_ADDRESS).svc",
    ]  # fmt: skip
    assert (leader["command"], leader["args"]) == (SERVE, joined)
    assert (worker["command"], worker["args"]) == (SERVE, [*joined, "--headless"])
    assert leader["livenessProbe"]["httpGet"]["path"] == "/server-healthz"
    assert "startupProbe" in leader
    assert not {"livenessProbe", "startupProbe", "readinessProbe"} & worker.keys()


def test_arguments_of_the_template_come_first_and_its_probes_are_of_the_first_node() -> None:
    probe = {"httpGet": {"path": "/mine", "port": 1}}
    chosen = target(command=None, args=["--model", "/m"], livenessProbe=probe)
    made = leader_worker_set.build(chosen, chosen.run.servers[0])
    leader, worker = (pod["spec"]["containers"][0] for pod in pods(made))
    assert leader["args"][:2] == worker["args"][:2] == ["--model", "/m"]
    assert leader["livenessProbe"] == probe
    assert leader["startupProbe"]["httpGet"]["path"] == "/health", "it says that all have joined"
    assert "livenessProbe" not in worker


def test_a_container_to_whose_command_nothing_can_be_appended_is_refused() -> None:
    chosen = target(command=None)
    with pytest.raises(SpecError, match=r"\[rollout\].template .* neither command nor args"):
        leader_worker_set.build(chosen, chosen.run.servers[0])


def test_the_agents_of_one_server_find_one_another(tmp_path: Any) -> None:
    sync = {"fellows": True, "prepareSeconds": 60}
    leader, worker = (agent_of(pod) for pod in pods(built({"sync": sync})))
    name = "tiny-server-rollout-1"
    memory = {env.STAGING_MEMORY: str(tmp_path)}
    first = read_settings([], {**variables(leader, name), **memory})
    assert first.other_hosts == tuple(
        f"http://{name}-{rank}.{name}.team.svc:{names.AGENT_PORT}" for rank in (1, 2)
    )
    assert (first.server, first.fellows) == ("http://127.0.0.1:8000", True)
    assert first.prepare_seconds == 60
    assert env.AGENT_PREPARE_SECONDS not in variables(worker, f"{name}-2")
    assert first.rendezvous is not None
    other = read_settings([], {**variables(worker, f"{name}-2"), **memory})
    assert other.stages_only
    assert other.server == f"http://{name}.{name}.team.svc:{names.AGENT_PORT}"
    assert (other.rendezvous, other.fellows) == (None, False)
    assert other.directory == first.directory
    probes = [one["readinessProbe"]["httpGet"]["path"] for one in (leader, worker)]
    assert probes == ["/readyz", "/healthz"]


def test_the_first_node_alone_has_a_token() -> None:
    for pod, has in zip(pods(built()), (True, False), strict=True):
        assert ("trainsync-token" in {v["name"] for v in pod["spec"]["volumes"]}) is has
        paths = {mount["mountPath"] for mount in agent_of(pod)["volumeMounts"]}
        assert (names.TOKEN_DIRECTORY in paths) is has
        assert {names.CHECKPOINT_MOUNT, names.STAGING_MOUNT} <= paths


def test_requests_and_evictions_are_about_the_first_nodes() -> None:
    chosen = target()
    (server,) = chosen.run.servers
    selector = service.build(chosen, server)["spec"]["selector"]
    assert selector[LABEL_RANK] == "0"
    assert budget.build(chosen, server)["spec"]["selector"]["matchLabels"] == selector


def test_a_group_is_made_at_once_and_recreated_by_nobody_but_the_operator() -> None:
    spec = built({"replicas": 2})["spec"]
    assert (spec["replicas"], spec["startupPolicy"]) == (2, "LeaderCreated")
    assert spec["leaderWorkerTemplate"]["size"] == 3
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"
    # That of all would be the Service of the servers, which has an address of its own.
    assert spec["networkConfig"] == {"subdomainPolicy": "UniquePerReplica"}


def live_of(made: Object, replicas: int | None = None) -> Object:
    found = copy.deepcopy(made)
    found["spec"]["replicas"] = made["spec"].get("replicas", 1) if replicas is None else replicas
    return found


def counts(made: Object) -> tuple[int, str | None]:
    """Servers that are made, and of how many asked for one more is there."""
    surge = made["metadata"]["annotations"].get(names.ANNOTATION_SURGE_OF)
    return made["spec"]["replicas"], surge


@pytest.mark.parametrize("entry", [{"replicas": 2}, {}])
def test_one_more_server_is_there_until_all_are_replaced(entry: Object) -> None:
    live = live_of(built(entry), 2)
    assert counts(built(entry, live)) == (2, None)
    first = built(entry, live, image="vllm:2", renewed=2)
    assert counts(first) == (3, "2"), "those that are ready are of the old template"
    assert leader_worker_set.asked(first) == 2
    for renewed in (0, 1, 2):
        assert counts(built(entry, first, image="vllm:2", renewed=renewed)) == (3, "2")
    last = built(entry, first, image="vllm:2", renewed=3)
    assert counts(last) == (2, None)
    assert counts(built(entry, last, image="vllm:2", renewed=2)) == (2, None)


def test_servers_are_scaled_while_they_are_replaced() -> None:
    surging = built({}, live_of(built({}), 2), image="vllm:2")
    by_hand = live_of(surging, 5)
    assert leader_worker_set.asked(by_hand) == 5
    assert counts(built({}, by_hand, image="vllm:2", renewed=1)) == (6, "5")
    fewer = built({"replicas": 1}, surging, image="vllm:2", renewed=1)
    assert counts(fewer) == (2, "1")


def test_a_suspension_forgets_the_one_more() -> None:
    surging = built({}, live_of(built({}), 2), image="vllm:2")
    asleep = built({}, surging, image="vllm:2", serves=False)
    assert asleep["spec"]["replicas"] == 0
    assert asleep["metadata"]["annotations"][names.ANNOTATION_REPLICAS] == "2"
    awake = built({}, asleep, image="vllm:3")
    assert counts(awake) == (2, None), "nothing is there to be replaced"


def test_no_server_is_added_where_none_is_asked_for() -> None:
    live = live_of(built({"replicas": 0}))
    assert counts(built({"replicas": 0}, live, image="vllm:2")) == (0, None)
    assert counts(built({"replicas": 2}, live, image="vllm:2")) == (2, None)


def test_the_hash_has_no_part_of_who_scales_and_tells_of_the_one_more() -> None:
    def hash_of(made: Object) -> str:
        found: str = made["metadata"]["annotations"][names.ANNOTATION_HASH]
        return found

    first = built({})
    assert hash_of(built({}, live_of(first, 4))) == hash_of(built({}, live_of(first, 1)))
    new = {"image": "vllm:2"}
    surging = built({}, live_of(first, 2), **new)
    ended = built({}, surging, renewed=3, **new)
    assert hash_of(surging) != hash_of(ended) == hash_of(built({}, **new))
