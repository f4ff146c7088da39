"""The children built for an entry of spec.servers."""

import copy
from typing import Any

import pytest
from trainsync.agent.settings import read_settings
from trainsync.api import env, names
from trainsync.engines.servers.adapter import Adapter
from trainsync.runtime.sync_store import SyncStore
from trainsync.storage.objects.of_run import options_of_run
from trainsync_operator.builders import raycluster
from trainsync_operator.builders.servers import budget, deployment, pod, service
from trainsync_operator.builders.target import MonitorSettings, Target
from trainsync_operator.reconcile.run import SpecError, parse

from tests.unit.operator.support import UID, make_run, raw_run, with_servers

Object = dict[str, Any]


def target(run_spec: Object) -> Target:
    return Target(make_run(run_spec), 7, 5, MonitorSettings("monitor:1"))


def built(entry: Object | None = None, live: Object | None = None, **arguments: Any) -> Object:
    """The Deployment of one entry."""
    chosen = target(with_servers({"name": "rollout", **(entry or {})}))
    (server,) = chosen.run.servers
    return deployment.build(chosen, server, live, **arguments)


def template(*containers: Object, **spec: Any) -> Object:
    first = {"name": "vllm", "image": "vllm:1"}
    return {"spec": {"containers": list(containers) or [first], **spec}}


def pod_of(made: Object) -> Object:
    found: Object = made["spec"]["template"]["spec"]
    return found


def agent_of(made: Object) -> Object:
    found: Object = pod_of(made)["initContainers"][-1]
    return found


def variables(container: Object) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container["env"] if "value" in e}


def test_all_children_of_an_entry_share_its_name_and_belong_to_the_run() -> None:
    chosen = target(with_servers({"name": "rollout"}))
    (server,) = chosen.run.servers
    children = [builder.build(chosen, server) for builder in (deployment, service, budget)]
    for child in children:
        meta = child["metadata"]
        assert meta["name"] == "tiny-server-rollout"
        (owner,) = meta["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (UID, True)
        assert meta["labels"].items() >= pod.labels("tiny", server).items()


def test_no_label_speaks_of_an_attempt() -> None:
    made = built()
    labels = (made["metadata"]["labels"], made["spec"]["template"]["metadata"]["labels"])
    assert not any(names.LABEL_ATTEMPT in of for of in labels)


def test_the_longest_names_fit_into_the_name_of_a_service() -> None:
    name = "s" * 40
    run = raw_run(with_servers({"name": name}), name="r" * (names.MAX_RUN_AND_SERVER_NAME - 40))
    chosen = Target(parse(run), 0, 0, MonitorSettings("m"))
    assert len(service.build(chosen, chosen.run.servers[0])["metadata"]["name"]) == 63


def test_no_server_goes_before_another_is_ready() -> None:
    rolling = built()["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 0, "maxSurge": 1}


def test_the_service_routes_to_the_servers_port() -> None:
    chosen = target(with_servers({"name": "rollout", "port": 9000}))
    (server,) = chosen.run.servers
    made = service.build(chosen, server)["spec"]
    (port,) = made["ports"]
    assert (port["port"], port["targetPort"]) == (9000, 9000)
    assert made["selector"] == built()["spec"]["selector"]["matchLabels"]


def test_the_agent_is_a_sidecar_with_the_image_of_the_server_and_decides_readiness() -> None:
    agent = agent_of(built())
    assert (agent["restartPolicy"], agent["image"]) == ("Always", "vllm:1")
    assert agent["command"][-2:] == ["-m", "trainsync.agent"]
    assert agent["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert agent["readinessProbe"]["failureThreshold"] == 1
    assert agent["startupProbe"]["httpGet"]["path"] == "/healthz", "the server starts after it"
    (port,) = agent["ports"]
    assert (port["name"], port["containerPort"]) == (pod.AGENT, names.AGENT_PORT)
    assert len(port["name"]) <= 15


def test_the_agent_reads_its_settings_from_what_it_is_given(tmp_path: Any) -> None:
    entry = {
        "name": "rollout", "port": 9000, "maxStaleness": 4, "proof": "Required",
        "sync": {"pause": "abort", "fellows": True, "prepareSeconds": 60},
    }  # fmt: skip
    given = variables(agent_of(built(entry)))
    places = {env.STAGING_MEMORY: str(tmp_path), env.AGENT_HOST: "10.1.2.3"}
    settings = read_settings([], {**given, **places})
    assert settings.server == "http://127.0.0.1:9000"
    assert str(settings.directory) == "/trainsync/checkpoints/tiny"
    assert (settings.run_uid, settings.port) == (UID, names.AGENT_PORT)
    assert (settings.pause, settings.proof, settings.fellows) == ("abort", "required", True)
    assert (settings.max_staleness, settings.prepare_seconds) == (4, 60)
    assert given[env.SERVERS] == "rollout"
    assert given[env.MONITOR_URL] == "http://tiny-monitor.team.svc:8080"
    from_pod = {e["name"] for e in agent_of(built())["env"] if "valueFrom" in e}
    assert from_pod == {env.POD_NAME, env.AGENT_HOST}


def test_agents_neither_share_versions_nor_prepare_them_unless_asked_to() -> None:
    given = variables(agent_of(built()))
    assert not {env.AGENT_FELLOWS, env.AGENT_PREPARE_SECONDS} & given.keys()


def test_the_agent_reads_the_adapter_and_the_server_takes_adapters(tmp_path: Any) -> None:
    config = {
        "peft_type": "LORA", "r": 16, "lora_alpha": 32.5, "lora_dropout": 0.05,
        "target_modules": r"model\.(a|b)$(c)$$", "modules_to_save": None,
    }  # fmt: skip
    made = built({"adapter": {"name": "team/rollout", "config": config}})
    given = variables(agent_of(made))
    assert "$" not in given[env.AGENT_ADAPTER_CONFIG], "Kubernetes would expand it"
    places = {env.STAGING_MEMORY: str(tmp_path), env.AGENT_HOST: "10.1.2.3"}
    settings = read_settings([], {**given, **places})
    assert settings.adapter == Adapter("team/rollout", config, 16)
    (server,) = pod_of(made)["containers"]
    assert variables(server)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    # Both must see one path, to which the adapter's folder is a link.
    memory = {m["mountPath"] for c in (server, agent_of(made)) for m in c["volumeMounts"]
              if m["name"] == "trainsync-memory"}  # fmt: skip
    assert memory == {names.STAGING_MOUNT}


def test_servers_of_whole_models_get_nothing_of_adapters() -> None:
    made = built()
    given = variables(agent_of(made))
    assert not {env.AGENT_ADAPTER, env.AGENT_ADAPTER_CONFIG} & given.keys()
    (server,) = pod_of(made)["containers"]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in variables(server)


def test_without_a_staleness_the_runs_holds() -> None:
    assert env.SYNC_MAX_STALENESS not in variables(agent_of(built()))
    run_spec = with_servers({"name": "rollout"})
    run_spec["sync"] |= {"style": "fully_async", "maxStaleness": 3, "interval": 2}
    chosen = target(run_spec)
    given = variables(agent_of(deployment.build(chosen, chosen.run.servers[0])))
    assert (given[env.SYNC_MAX_STALENESS], given[env.SYNC_INTERVAL]) == ("3", "2")


def test_server_and_agent_share_memory_and_the_agent_alone_has_claim_and_token() -> None:
    made = built()
    (server,) = pod_of(made)["containers"]
    agent = agent_of(made)

    def mounted(container: Object) -> dict[str, str]:
        return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}

    assert mounted(server) == {
        names.STAGING_MOUNT: "trainsync-memory",
        "/dev/shm": "trainsync-shm",
    }
    assert mounted(agent).keys() == {
        names.STAGING_MOUNT, names.CHECKPOINT_MOUNT, names.TOKEN_DIRECTORY
    }  # fmt: skip
    volumes = {volume["name"]: volume for volume in pod_of(made)["volumes"]}
    for name in ("trainsync-memory", "trainsync-shm"):
        assert volumes[name]["emptyDir"] == {"medium": "Memory"}
    assert pod_of(made)["enableServiceLinks"] is False
    (source,) = volumes["trainsync-token"]["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == names.servers_audience(UID)
    alive = server["livenessProbe"]["httpGet"]
    assert (alive["path"], alive["port"]) == ("/server-healthz", names.AGENT_PORT)
    starts = server["startupProbe"]
    assert starts["httpGet"]["path"] == "/health"
    assert starts["periodSeconds"] * starts["failureThreshold"] == 3600
    assert starts["periodSeconds"] <= 2, "one that is lost before it is known to have started"
    assert variables(server) == {
        "VLLM_SERVER_DEV_MODE": "1",
        env.STAGING_MEMORY: "/trainsync/memory",
    }


def test_an_sglang_server_gets_nothing_of_vllms_and_its_agent_speaks_sglang() -> None:
    made = built({"engine": "SGLang"})
    (server,) = pod_of(made)["containers"]
    assert "env" not in server
    path = server["startupProbe"]["httpGet"]["path"]
    assert path == "/ping", "its /health generates, and a paused server does not"
    assert variables(agent_of(made))[env.AGENT_ENGINE] == "sglang"
    assert variables(agent_of(built()))[env.AGENT_ENGINE] == "vllm"


@pytest.mark.parametrize("own", [False, True])
def test_an_agent_that_hands_tensors_over_shares_the_servers_memory_of_torch(
    own: bool, tmp_path: Any
) -> None:
    mount = {"name": "mine", "mountPath": "/dev/shm", "subPath": "a"}
    first = {"name": "sglang", "image": "sglang:1", **({"volumeMounts": [mount]} if own else {})}
    entry = {"engine": "SGLang", "sync": {"sglangRoute": "tensor"}, "template": template(first)}
    made = built(entry)
    (server,) = pod_of(made)["containers"]
    shared = [
        [one for one in container["volumeMounts"] if one["mountPath"] == "/dev/shm"]
        for container in (server, agent_of(made))
    ]
    assert shared[0] == shared[1]
    assert shared[0] == [mount if own else {"name": "trainsync-shm", "mountPath": "/dev/shm"}]
    given = {**variables(agent_of(made)), env.AGENT_HOST: "10.1.2.3"}
    assert read_settings([], {**given, env.STAGING_MEMORY: str(tmp_path)}).sglang_route == "tensor"


@pytest.mark.parametrize("route", ["disk", "distributed"])
def test_other_agents_have_no_memory_of_torch(route: str) -> None:
    agent = agent_of(built({"engine": "SGLang", "sync": {"sglangRoute": route}}))
    assert variables(agent).get(env.AGENT_SGLANG_ROUTE, "disk") == route
    assert "/dev/shm" not in {mount["mountPath"] for mount in agent["volumeMounts"]}


def test_the_agent_of_a_custom_server_gets_its_driver_and_says_when_the_server_has_started() -> (
    None
):
    made = built({"engine": "Custom", "driver": "mine.servers:make"})
    (server,) = pod_of(made)["containers"]
    assert variables(server) == {env.STAGING_MEMORY: "/trainsync/memory"}
    starts = server["startupProbe"]["httpGet"]
    assert (starts["path"], starts["port"]) == ("/server-healthz", names.AGENT_PORT)
    given = variables(agent_of(made))
    assert (given[env.AGENT_ENGINE], given[env.AGENT_DRIVER]) == ("custom", "mine.servers:make")
    assert env.AGENT_DRIVER not in variables(agent_of(built()))


def test_what_the_template_says_is_kept() -> None:
    probe = {"httpGet": {"path": "/mine", "port": 1}}
    first = {
        "name": "vllm",
        "image": "vllm:2",
        "imagePullPolicy": "Never",
        "env": [{"name": "HF_HOME", "value": "/models"}, {"name": "VLLM_SERVER_DEV_MODE"}],
        "livenessProbe": probe,
        "securityContext": {"runAsUser": 7},
        "volumeMounts": [
            {"name": "m", "mountPath": "/models"},
            {"name": "mine", "mountPath": "/dev/shm"},
        ],
    }
    volumes = [{"name": "trainsync-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}]
    mine = {"name": "download", "image": "curl:1"}
    given = template(
        first,
        {"name": "side", "image": "side:1"},
        volumes=volumes,
        initContainers=[mine],
        securityContext={"fsGroup": 5},
        nodeSelector={"gpu": "h200"},
        enableServiceLinks=True,
    )
    given["metadata"] = {"labels": {"team": "rl"}, "annotations": {"a": "b"}}
    before = copy.deepcopy(given)
    made = built({"template": given})
    assert given == before
    assert made["spec"]["template"]["metadata"]["annotations"] == {"a": "b"}
    assert made["spec"]["template"]["metadata"]["labels"]["team"] == "rl"
    spec = pod_of(made)
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert spec["volumes"][0] == volumes[0]
    assert "trainsync-shm" not in {volume["name"] for volume in spec["volumes"]}
    assert spec["enableServiceLinks"] is True
    assert spec["securityContext"]["fsGroup"] == 5
    server, side = spec["containers"]
    assert side == {"name": "side", "image": "side:1"}
    assert server["livenessProbe"] == probe
    assert "startupProbe" not in server, "the user's own probes are the user's"
    assert variables(server)["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables(server)["HF_HOME"] == "/models"
    download, agent = spec["initContainers"]
    assert download == mine
    assert (agent["image"], agent["imagePullPolicy"]) == ("vllm:2", "Never")
    assert agent["securityContext"]["runAsUser"] == 7, "shared memory belongs to one user"


def test_an_init_container_of_its_name_adds_to_the_agent() -> None:
    resources = {"limits": {"memory": "4Gi"}}
    own = {
        "name": pod.AGENT,
        "resources": resources,
        "command": ["sh"],
        "env": [
            {"name": env.AGENT_DTYPE, "value": "bfloat16"},
            {"name": env.SERVERS, "value": "others"},
        ],
    }
    made = built({"template": template(initContainers=[own])})
    (agent,) = pod_of(made)["initContainers"]
    assert agent["resources"] == resources
    assert agent["command"][-1] == "trainsync.agent"
    assert variables(agent)[env.AGENT_DTYPE] == "bfloat16"
    assert variables(agent)[env.SERVERS] == "rollout"


@pytest.mark.parametrize(
    "wrong",
    [template(initContainers="x"), template(volumes=[1]), template({"name": "a", "env": {"b": 1}})],
)
def test_a_template_that_is_none_is_refused_with_its_field(wrong: Object) -> None:
    with pytest.raises(SpecError, match=r"spec.servers\[rollout\].template is not a pod template"):
        built({"template": wrong})


def test_replicas_are_the_specs_where_it_says_so() -> None:
    live = {**built(), "spec": {"replicas": 5}}
    assert built({"replicas": 3}, live)["spec"]["replicas"] == 3
    assert built({"replicas": 3}, live, serves=False)["spec"]["replicas"] == 0


def test_replicas_that_the_spec_leaves_out_stay_with_who_scales_the_deployment() -> None:
    assert "replicas" not in built()["spec"]
    live = {**built(), "spec": {"replicas": 5}}
    made = built(None, live)
    assert made["spec"]["replicas"] == 5
    hashes = {d["metadata"]["annotations"][names.ANNOTATION_HASH] for d in (made, built())}
    assert len(hashes) == 1


@pytest.mark.parametrize("before", [0, 5])
def test_a_suspension_remembers_how_many_servers_there_were(before: int) -> None:
    live = {**built(), "spec": {"replicas": before}}
    asleep = built(None, live, serves=False)
    assert asleep["spec"]["replicas"] == 0
    again = built(None, asleep, serves=False)
    assert again["spec"]["replicas"] == 0
    awake = built(None, again)
    assert awake["spec"]["replicas"] == before
    assert names.ANNOTATION_REPLICAS not in awake["metadata"]["annotations"]


def test_servers_that_were_made_asleep_wake_up() -> None:
    asleep = built(None, built(None, serves=False), serves=False)
    assert built(None, asleep)["spec"]["replicas"] == 1


def test_replicas_that_leave_the_spec_of_a_suspended_run_are_those_it_had() -> None:
    asleep = built({"replicas": 3}, {**built(), "spec": {"replicas": 3}}, serves=False)
    still = built(None, asleep, serves=False)
    assert built(None, still)["spec"]["replicas"] == 3


def test_ray_pods_know_where_the_servers_are_and_a_change_of_servers_is_no_edit_of_pods() -> None:
    def ray(*entries: Object) -> Object:
        chosen = target(with_servers(*entries))
        return raycluster.build(chosen, chosen.run.spec.clusters[0])

    def urls(made: Object) -> str | None:
        worker = made["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
        return variables(worker).get(env.SERVER_URLS)

    one, two = ray({"name": "a"}), ray({"name": "a"}, {"name": "b", "port": 9})
    assert urls(one) == "a=http://tiny-server-a.team.svc:8000"
    assert urls(two) == f"{urls(one)},b=http://tiny-server-b.team.svc:9"
    made_from = [r["metadata"]["annotations"][names.ANNOTATION_MADE_FROM] for r in (one, two)]
    assert made_from[0] == made_from[1]
    assert urls(ray()) is None


_PLACE = {"url": "s3://bucket/run", "endpoint": "http://s3:7070", "region": "eu", "allowHttp": True}
_WRITER, _READER = ({"secretRef": {"name": name}} for name in ("writer", "reader"))


def by_store(store: Object | None = None, **changes: Any) -> Object:
    """The Deployment of the servers of a run whose weights go through a store."""
    sync = {"method": "store", "store": {**_PLACE, **(store or {})}}
    chosen = target(with_servers({"name": "rollout"}, sync=sync, **changes))
    return deployment.build(chosen, chosen.run.servers[0])


@pytest.mark.parametrize("volume", [True, False])
def test_where_weights_go_through_a_store_servers_have_no_volume(
    volume: bool, tmp_path: Any
) -> None:
    storage = {
        True: {"persistentVolumeClaim": {"claimName": "data"}},
        False: {"objectStore": {"url": "s3://bucket/run", "credentials": _WRITER}},
    }[volume]
    made = by_store(checkpoint={"storage": storage})
    volumes = {one["name"] for one in pod_of(made)["volumes"]}
    assert volumes == {"trainsync-token", "trainsync-memory", "trainsync-shm"}
    agent = agent_of(made)
    mounts = {mount["mountPath"] for mount in agent["volumeMounts"]}
    assert mounts == {names.STAGING_MOUNT, names.TOKEN_DIRECTORY}
    places = {env.STAGING_MEMORY: str(tmp_path), env.AGENT_HOST: "10.1.2.3"}
    settings = read_settings([], {**variables(agent), **places})
    assert settings.directory is None
    assert settings.store == SyncStore("s3://bucket/run", "http://s3:7070", "eu", allow_http=True)
    assert settings.run_uid == UID
    assert settings.rendezvous is not None


@pytest.mark.parametrize("reader", [{}, {"readCredentials": _READER}])
def test_where_commits_are_in_a_bucket_servers_read_there(reader: Object, tmp_path: Any) -> None:
    storage = {"objectStore": {**_PLACE, "credentials": _WRITER, **reader}}
    changes = {"sync": {"method": "checkpoint"}, "checkpoint": {"storage": storage}}
    chosen = target(with_servers({"name": "rollout"}, **changes))
    made = deployment.build(chosen, chosen.run.servers[0])
    volumes = {one["name"] for one in pod_of(made)["volumes"]}
    assert volumes == {"trainsync-token", "trainsync-memory", "trainsync-shm"}
    agent = agent_of(made)
    places = {env.STAGING_MEMORY: str(tmp_path), env.AGENT_HOST: "10.1.2.3"}
    found = {**variables(agent), **places}
    assert read_settings([], found).bucket == "s3://bucket/run"
    assert options_of_run(found).endpoint == "http://s3:7070"
    keys = [e["valueFrom"]["secretKeyRef"] for e in agent["env"] if "STORE_AWS" in e["name"]]
    assert {key["name"] for key in keys} == {"reader" if reader else "writer"}


@pytest.mark.parametrize(
    ("given", "secret"),
    [
        ({}, None),
        ({"credentials": _WRITER}, "writer"),
        ({"credentials": _WRITER, "readCredentials": _READER}, "reader"),
    ],
)
def test_agents_read_with_the_credentials_of_readers_and_the_server_has_none(
    given: Object, secret: str | None
) -> None:
    made = by_store(given)
    keys = [e for e in agent_of(made)["env"] if "secretKeyRef" in e.get("valueFrom", {})]
    assert {e["valueFrom"]["secretKeyRef"]["name"] for e in keys} == ({secret} if secret else set())
    assert all(e["name"].startswith("TRAINSYNC_SYNC_STORE_AWS_") for e in keys)
    (server,) = pod_of(made)["containers"]
    assert "STORE" not in str(server["env"])


def test_a_volume_and_no_store_is_for_committed_weights() -> None:
    assert "STORE" not in str(built())
    assert "trainsync-checkpoints" in str(built())
