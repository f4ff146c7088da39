"""``trainsync run`` against a real API server, with the real operator and hand-made reports.

No Ray pod must become ready here, so the images need not exist.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config
from trainsync.api import events, names
from trainsync.api.protocol import SaveKind
from trainsync.monitor.change_signal import ChangeSignal
from trainsync.monitor.kube.client import ClusterApi, KubeError
from trainsync.monitor.ledger.saves import AbortCause, AbortReason, SaveKey, SaveOwner
from trainsync.monitor.server.event_poster import EventPoster
from trainsync.monitor.server.events import EventQueue

from tests.cluster.conftest import ROOT, Kubectl, left_over, wait_until
from tests.cluster.manifests import changed, minimal
from tests.cluster.operator.operator_process import binding_name, running_operator
from tests.unit.cli.run.api_server import minutes_ago

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("crd"),
]

NO_IMAGE = "localhost/trainsync/none:1"
RUN = "watched"
EVIL = "\x1b]0;owned\x07[red]x[/red]"


@pytest.fixture(scope="module")
def run(
    module_namespace: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """A run with its children, for which this test reports in the monitor's place."""
    ns = module_namespace
    with running_operator(ns, tmp_path_factory.mktemp("operator"), NO_IMAGE):
        manifest = changed(minimal(RUN), "spec.clusters.0.image", NO_IMAGE)
        claim = {"volumeClaimTemplate": {"size": "1Mi", "retentionPolicy": "Delete"}}
        done = ns.apply(changed(manifest, "spec.checkpoint.storage", claim))
        assert done.returncode == 0, done.stderr
        wait_until("it is starting", lambda: phase(ns) == "Starting")
        report(ns)
        found = ns.get("trainingrun", RUN)
        assert found is not None
        yield found
        ns("delete", "trainingrun", RUN, "--wait=false")
        wait_until(f"nothing is left of {RUN}", lambda: not left_over(ns, RUN), 90)


def phase(ns: Kubectl) -> str | None:
    found = ns.get("trainingrun", RUN)
    assert found is not None
    word: str | None = (found.get("status") or {}).get("phase")
    return word


def report(ns: Kubectl) -> None:
    """The monitor's part of the status."""
    saved = {
        "step": 40,
        "path": "global_step_40",
        "manifestDigest": "sha256:0",
        "bytes": 1000,
        "time": minutes_ago(0),
    }
    explorers = [{"id": EVIL, "version": 44, "lag": 1, "state": "lost", "message": EVIL}]
    status = {
        "progress": {"step": 45, "totalSteps": 60, "lastReportTime": minutes_ago(0)},
        "checkpoint": {"lastCommitted": saved, "inFlight": [], "retained": [40]},
        "weights": {
            "trainerVersion": 45,
            "lag": 1,
            "method": "memory",
            "explorers": explorers,
        },
    }
    patch = json.dumps({"status": status})
    ns("patch", "trainingrun", RUN, "--subresource=status", "--type=merge", "-p", patch)


def call(kubeconfig: str | Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``trainsync run …``, as a user would."""
    code = "from trainsync.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "run", *words, "--kubeconfig", str(kubeconfig)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_one_screen_of_a_real_run(
    kubeconfig: str, module_namespace: Kubectl, run: dict[str, Any]
) -> None:
    where = ("-n", str(module_namespace.namespace))
    done = call(kubeconfig, "status", RUN, *where)
    assert done.returncode == 0, done.stderr
    for part in ("Starting", "45/60", "75%", "step 40", "version 45 by memory", "0/1 workers"):
        assert part in done.stdout, done.stdout
    assert "Ready is False" in done.stdout
    assert "\x1b" not in done.stdout
    found = json.loads(call(kubeconfig, "status", RUN, *where, "--json").stdout)
    assert found["uid"] == run["metadata"]["uid"]
    assert RUN in call(kubeconfig, "status", *where).stdout


def test_the_events_of_the_run_and_of_its_children(
    kubeconfig: str, module_namespace: Kubectl, run: dict[str, Any]
) -> None:
    def kinds() -> set[str]:
        where = ("-n", str(module_namespace.namespace), "--json")
        done = call(kubeconfig, "events", RUN, *where)
        assert done.returncode == 0, done.stderr
        return {event["kind"] for event in json.loads(done.stdout)["events"]}

    wait_until("events of the run and its pods", lambda: {"TrainingRun", "Pod"} <= kinds(), 90)


def test_the_monitor_posts_events_with_the_rights_that_its_role_gives(
    kubeconfig: str, module_namespace: Kubectl, run: dict[str, Any]
) -> None:
    ns = module_namespace
    account = names.monitor_name(RUN)
    binding = binding_name(RUN)
    wait_until("its role is bound", lambda: ns.get("rolebinding", binding) is not None)
    token = ns("create", "token", account).strip()
    asyncio.run(post_as_the_monitor(kubeconfig, token, str(ns.namespace), run["metadata"]["uid"]))
    done = call(kubeconfig, "events", RUN, "-n", str(ns.namespace), "--warnings", "--json")
    assert done.returncode == 0, done.stderr
    [found] = [e for e in json.loads(done.stdout)["events"] if e["reason"] == "CheckpointAborted"]
    assert found["message"] == "checkpoint 41 of attempt 0: model.0: disk full"
    assert "CheckpointAborted" in ns("describe", "trainingrun", RUN)


async def post_as_the_monitor(kubeconfig: str, token: str, namespace: str, uid: str) -> None:
    """Post an abort like the monitor, with the monitor's permissions."""
    settings = kubernetes_client.Configuration()
    await config.load_kube_config(kubeconfig, client_configuration=settings)
    settings.cert_file = settings.key_file = None  # drop the administrator's certificate
    settings.api_key = {"BearerToken": f"Bearer {token}"}
    async with kubernetes_client.ApiClient(configuration=settings) as client:
        counts: asyncio.Queue[str] = asyncio.Queue()
        signal = ChangeSignal()
        queue = EventQueue(lambda: datetime.now(UTC), wake=signal.notify_threadsafe)
        key = SaveKey(SaveOwner(0, "incarnation"), 41, SaveKind.CHECKPOINT)
        queue.aborted(key, AbortCause(AbortReason.PARTICIPANT_FAILED, "model.0: disk full"))
        api = ClusterApi(client, namespace=namespace, run=RUN)
        poster = EventPoster(
            api, queue, namespace=namespace, run=RUN, uid=uid, count=counts.put_nowait
        )
        posting = asyncio.create_task(poster.run(signal))
        async with asyncio.timeout(30):
            assert await counts.get() == "posted"
        posting.cancel()
        # No more permissions: neither Events of others nor other namespaces.
        elsewhere = ClusterApi(client, namespace="default", run=RUN)
        with pytest.raises(KubeError, match="403"):
            await elsewhere.create_event(
                events.build(
                    namespace="default",
                    run=RUN,
                    uid=uid,
                    reason="Reason",
                    message="",
                    warning=False,
                    component="test",
                    now=datetime.now(UTC),
                )
            )


def test_the_timeline_says_what_it_cannot_have(
    kubeconfig: str, module_namespace: Kubectl, run: dict[str, Any]
) -> None:
    done = call(kubeconfig, "timeline", RUN, "-n", str(module_namespace.namespace))
    assert done.returncode == 0, done.stderr
    assert "Created: The run was taken up." in done.stdout
    assert "checkpoint 40 was committed." in done.stdout
    assert "without the monitor's part" in done.stderr


def test_a_run_or_namespace_that_is_not_there(
    kubeconfig: str, module_namespace: Kubectl, run: dict[str, Any]
) -> None:
    done = call(kubeconfig, "status", "watchd", "-n", str(module_namespace.namespace))
    assert done.returncode == 2
    assert f"did you mean {RUN}?" in done.stderr
    done = call(kubeconfig, "status", RUN, "-n", "no-such-namespace")
    assert done.returncode == 2
    assert f"but one in {module_namespace.namespace}" in done.stderr


def test_without_rights_it_says_which_is_lacking(
    kubeconfig: str, module_namespace: Kubectl, run: dict[str, Any], tmp_path: Path
) -> None:
    ns = module_namespace
    ns("create", "serviceaccount", "nobody")
    token = ns("create", "token", "nobody").strip()
    view: dict[str, Any] = json.loads(
        ns("config", "view", "--raw", "--flatten", "--minify", "-o", "json")
    )
    view["users"] = [{"name": "nobody", "user": {"token": token}}]
    view["contexts"][0]["context"]["user"] = "nobody"
    file = tmp_path / "nobody.kubeconfig"
    file.write_text(json.dumps(view))
    for command in ("status", "events", "timeline"):
        done = call(file, command, RUN, "-n", str(ns.namespace))
        assert done.returncode == 3
        assert "you may not read TrainingRun" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        assert token not in done.stdout + done.stderr
