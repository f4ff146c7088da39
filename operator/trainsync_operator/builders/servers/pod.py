"""The pod of a server: the user's template, with the agent beside the first container."""

import copy
import json
from typing import Any, Final

from trainsync.api import env, names
from trainsync.api.servers import Engine, ProofPolicy, Server, SGLangRoute

from trainsync_operator.builders import bucket
from trainsync_operator.builders.pod_template import (
    of_store,
    replace_named,
    run_mounts,
    run_volumes,
    share_group,
    store_keys,
)
from trainsync_operator.builders.servers import hosts
from trainsync_operator.builders.servers.hosts import PodRole
from trainsync_operator.builders.target import Target
from trainsync_operator.reconcile.run import SpecError

COMPONENT: Final = "server"
AGENT: Final = "trainsync-agent"
_MEMORY_VOLUME: Final = "trainsync-memory"
_MEMORY_MOUNT: Final = {"name": _MEMORY_VOLUME, "mountPath": names.STAGING_MOUNT}
# A container has 64 MiB of it, and the workers of one server speak to each other through more.
_SHARED_VOLUME: Final = "trainsync-shm"
_SHARED_MOUNT: Final = {"name": _SHARED_VOLUME, "mountPath": "/dev/shm"}  # noqa: S108 - a pod's own
_IN_MEMORY: Final = {"medium": "Memory"}
_ENGINES: Final = {Engine.VLLM: "vllm", Engine.SGLANG: "sglang", Engine.CUSTOM: "custom"}
# For vLLM: without the first the agent cannot change the server. SGLang needs none.
_SERVER_VARIABLES: Final = {
    Engine.VLLM: {"VLLM_SERVER_DEV_MODE": "1", env.STAGING_MEMORY: names.STAGING_MOUNT},
    Engine.SGLANG: {},
    Engine.CUSTOM: {env.STAGING_MEMORY: names.STAGING_MOUNT},
}
_TAKES_ADAPTERS: Final = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
# SGLang's /health generates, which a server does not between pause and resume. Of others the agent
# knows.
_ALIVE: Final = {Engine.VLLM: "/health", Engine.SGLANG: "/ping"}
_PROOF: Final = {ProofPolicy.IF_PRESENT: "if-present", ProofPolicy.REQUIRED: "required"}
# A large model takes minutes to load, from a slow volume much longer.
_SERVER_STARTS_SECONDS: Final = 3600
_PROBE_SECONDS: Final = 10
# A server that is lost before it is known to have started is not missed within the hour above.
_START_PROBE_SECONDS: Final = 2
# An agent that has ended four times in a row is back by then. No longer: a vLLM whose engine died
# waits at its end for requests that the engine had, for ever, and only this probe ends the wait.
_AGENT_AWAY_SECONDS: Final = 120
# Shared memory belongs to one user: the agent runs as the server's container does.
_IDENTITY: Final = ("runAsUser", "runAsGroup", "runAsNonRoot")


def labels(run: str, server: Server) -> dict[str, str]:
    """Labels of the pods, and of nothing else in the namespace."""
    return {
        names.LABEL_RUN: run,
        names.LABEL_COMPONENT: COMPONENT,
        names.LABEL_SERVER: server.name,
    }


def _environment(target: Target, server: Server, role: PodRole) -> list[dict[str, Any]]:
    spec, run = target.run.spec, target.run
    store = spec.sync.store
    variables = {
        env.RUN_NAME: run.name,
        env.RUN_NAMESPACE: run.namespace,
        env.RUN_UID: run.uid,
        env.SERVERS: server.name,
        env.MONITOR_URL: names.monitor_url(run.name, run.namespace),
        env.TOKEN_FILE: names.TOKEN_FILE,
        **({env.CHECKPOINT_DIR: target.checkpoint_directory} if store is None else of_store(store)),
        env.SYNC_INTERVAL: str(spec.sync.interval),
        env.SYNC_TIMEOUT_SECONDS: str(spec.sync.timeout_seconds),
        env.STAGING_MEMORY: names.STAGING_MOUNT,
        env.AGENT_ENGINE: _ENGINES[server.engine],
        env.AGENT_SERVER: f"http://127.0.0.1:{server.port}",
        env.AGENT_PORT: str(names.AGENT_PORT),
        env.AGENT_PAUSE: server.sync.pause,
        env.AGENT_PROOF: _PROOF[server.proof],
    }
    if server.driver is not None:
        variables[env.AGENT_DRIVER] = server.driver
    if server.sync.sglang_route is not SGLangRoute.DISK:
        variables[env.AGENT_SGLANG_ROUTE] = server.sync.sglang_route
    if role is PodRole.WORKER:
        # The agent beside the server that answers reports of it, and asks its fellows.
        for name in (env.SERVERS, env.TOKEN_FILE, env.AGENT_SERVER):
            del variables[name]
    else:
        if server.sync.fellows:
            variables[env.AGENT_FELLOWS] = "true"
        if server.adapter is not None:
            variables[env.AGENT_ADAPTER] = server.adapter.name
            # Kubernetes expands $(NAME) in values, which a regular expression may have.
            config = json.dumps(server.adapter.config, sort_keys=True).replace("$", "\\u0024")
            variables[env.AGENT_ADAPTER_CONFIG] = config
        if server.sync.prepare_seconds:
            variables[env.AGENT_PREPARE_SECONDS] = str(server.sync.prepare_seconds)
    staleness = spec.sync.max_staleness if server.max_staleness is None else server.max_staleness
    if staleness is not None:
        variables[env.SYNC_MAX_STALENESS] = str(staleness)
    entries: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in variables.items()]
    # After the name of the pod, of which it is made.
    others = hosts.agents(target, server, role)
    # Its own address and no other: 0.0.0.0 is none where pods have IPv6 alone.
    for name, path in ((env.POD_NAME, "metadata.name"), (env.AGENT_HOST, "status.podIP")):
        source = {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}
        entries.append({"name": name, "valueFrom": source})
    entries += [{"name": k, "value": v} for k, v in others.items()]
    if store is None:
        return entries + bucket.of_run(target, opens=False, reads=True)
    return entries + store_keys(store, reads=True)


def _reads_volume(target: Target) -> bool:
    """Whether agents read versions on the run's volume; else in the store of weights."""
    return target.run.spec.sync.store is None


def _probe(path: str, port: int | str, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _agent(
    target: Target, server: Server, role: PodRole, beside: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """The agent's container; ``given`` is the user's part of it."""
    mounts = [*run_mounts(target, saves=_reads_volume(target)), _MEMORY_MOUNT]
    if role is PodRole.WORKER:  # it asks the monitor for nothing
        mounts = [mount for mount in mounts if mount["mountPath"] != names.TOKEN_DIRECTORY]
    if server.sync.sglang_route is SGLangRoute.TENSOR:  # where torch shares tensors
        shared = _SHARED_MOUNT["mountPath"]
        mounts += [dict(m) for m in beside["volumeMounts"] if m.get("mountPath") == shared]
    # That of a node that answers no request is ready while it lives: the first node's counts.
    ready = "/healthz" if role is PodRole.WORKER else "/readyz"
    own = beside.get("securityContext") or {}
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        **{key: own[key] for key in _IDENTITY if key in own},
        **(given.get("securityContext") or {}),
    }
    pulled: dict[str, Any] = {
        key: beside[key] for key in ("image", "imagePullPolicy") if key in beside
    }
    return {
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "startupProbe": _probe("/healthz", AGENT, 2, 60),
        "livenessProbe": _probe("/healthz", AGENT, 10, 3),
        # One refusal is enough: no request may reach weights that the agent does not vouch for.
        "readinessProbe": _probe(ready, AGENT, 2, 1),
        **pulled,
        **given,
        "name": AGENT,
        "command": ["python3", "-m", "trainsync.agent"],
        # A sidecar: it starts before the server, and ends after it.
        "restartPolicy": "Always",
        "env": replace_named(given.get("env") or [], _environment(target, server, role), "name"),
        "ports": [{"name": AGENT, "containerPort": names.AGENT_PORT, "protocol": "TCP"}],
        "securityContext": security,
        "volumeMounts": replace_named(given.get("volumeMounts") or [], mounts, "mountPath"),
    }


def _complete(container: dict[str, Any], server: Server, role: PodRole) -> None:
    """Add to the user's container of the server."""
    hosts.complete(container, server, role)
    needed = _SERVER_VARIABLES[server.engine] | ({} if server.adapter is None else _TAKES_ADAPTERS)
    variables = [{"name": name, "value": value} for name, value in needed.items()]
    if variables:
        container["env"] = replace_named(container.get("env") or [], variables, "name")
    mounts = container.get("volumeMounts") or []
    container["volumeMounts"] = replace_named(mounts, [_MEMORY_MOUNT], "mountPath")
    if not any(mount.get("mountPath") == _SHARED_MOUNT["mountPath"] for mount in mounts):
        container["volumeMounts"].append(dict(_SHARED_MOUNT))
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    if role is PodRole.WORKER:
        return
    own = "livenessProbe" in container
    if not own:
        # The agent asks the server, and knows of weights that only a new server may mend.
        failures = _AGENT_AWAY_SECONDS // _PROBE_SECONDS
        probe = _probe("/server-healthz", names.AGENT_PORT, _PROBE_SECONDS, failures)
        container["livenessProbe"] = probe
    if not own or role is PodRole.LEADER:  # a started leader says that all nodes have joined it
        starts = _SERVER_STARTS_SECONDS // _START_PROBE_SECONDS
        alive, port = _ALIVE.get(server.engine), server.port
        if alive is None:
            alive, port = "/server-healthz", names.AGENT_PORT
        container.setdefault("startupProbe", _probe(alive, port, _START_PROBE_SECONDS, starts))


def template(target: Target, server: Server, role: PodRole = PodRole.WHOLE) -> dict[str, Any]:
    """The pod template; what the user's says is kept where the agent can work with it.

    Raises:
        SpecError: the user's is no pod template; the API server checks little of it.
    """
    try:
        return _template(target, server, role)
    except (AttributeError, TypeError, ValueError) as error:
        field = f"spec.servers[{server.name}].template"
        raise SpecError(f"{field} is not a pod template ({error}): correct it") from error


def _template(target: Target, server: Server, role: PodRole) -> dict[str, Any]:
    result: dict[str, Any] = copy.deepcopy(server.template)
    metadata = result.setdefault("metadata", {})
    own_labels = metadata.get("labels") or {}
    metadata["labels"] = {**own_labels, **labels(target.run.name, server)}
    spec = result["spec"]
    first = spec["containers"][0]
    _complete(first, server, role)

    before = spec.get("initContainers") or []
    given = next((container for container in before if container.get("name") == AGENT), None)
    agent = _agent(target, server, role, first, given or {})
    spec["initContainers"] = replace_named(before, [agent], "name")

    audience = names.servers_audience(target.run.uid)
    ours = run_volumes(target, audience, saves=_reads_volume(target))
    mounted = {mount.get("name") for mount in [*first["volumeMounts"], *agent["volumeMounts"]]}
    ours = [volume for volume in ours if volume["name"] in mounted]
    volumes = replace_named(spec.get("volumes") or [], ours, "name")
    for own in (_MEMORY_VOLUME, _SHARED_VOLUME):
        if own in mounted and not any(volume.get("name") == own for volume in volumes):
            # Without a limit of its own: what lies there counts as its writer's memory.
            volumes.append({"name": own, "emptyDir": dict(_IN_MEMORY)})
    spec["volumes"] = volumes

    share_group(spec)
    security = spec["securityContext"]
    security.setdefault("fsGroupChangePolicy", "OnRootMismatch")
    security.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    spec.setdefault("automountServiceAccountToken", False)
    # A Service called vllm would give the server a variable VLLM_PORT, which vLLM reads.
    spec.setdefault("enableServiceLinks", False)
    return result
