"""Stands in for vLLM on several nodes, and takes versions as vLLM does.

As with vLLM, the first node serves once all others have joined it; one that comes later waits for
ever; the first one does not notice when another goes, and another not when the first one goes.
"""

from pathlib import Path
from typing import Any, Final

from trainsync.api import env, names
from trainsync_operator.builders.servers.pod import AGENT

from demo.adapt import ENV_VOLUME
from demo.platform import Platform
from images.pod_env import MOUNT_PATH
from tests.unit.agent import fake_server as unit
from tests.unit.agent import runs

NODES: Final = 2
ENGINE: Final = "engine"
# Python and its standard library alone: torch takes a while, and only versions need it.
_JOIN: Final = """
import argparse, http.server, json, os, signal, socket, sys, threading, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
options = argparse.ArgumentParser()
options.add_argument("--nnodes", type=int)
options.add_argument("--node-rank", type=int)
options.add_argument("--master-addr")
options.add_argument("--headless", action="store_true")
given = options.parse_args()
assert given.headless == (given.node_rank > 0)
memory = Path(os.environ["TRAINSYNC_STAGING_MEMORY"])

def sums(reference):
    from trainsync.weights.staging.index import StagedReference
    from trainsync.weights.staging.reading import StagedReader
    tensors = StagedReader(memory).open(StagedReference.told(reference)).tensors
    return {name: float(tensor.double().sum()) for name, tensor in tensors.items()}

if given.headless:
    while True:
        try:
            joined = socket.create_connection((given.master_addr, 29501), timeout=5)
            break
        except OSError:
            time.sleep(0.2)
    joined.settimeout(None)
    said = joined.makefile("rw")
    for line in said:
        said.write(json.dumps(sums(json.loads(line))) + "\\n")
        said.flush()
    threading.Event().wait()
with socket.create_server(("", 29501)) as rendezvous:
    others = [rendezvous.accept()[0].makefile("rw") for _ in range(given.nnodes - 1)]
"""
# As the unit tests' server, whose other hosts are in the same place as its first.
_SERVE: Final = """
class Spread(FakeServer):
    def _look(self, reference):
        found = super()._look(reference)
        for rank, other in enumerate(others, 1):
            other.write(json.dumps(reference.on_host(rank).as_dict()) + "\\n")
            other.flush()
            there = json.loads(other.readline())
            assert there == {name: float(one.double().sum()) for name, one in found.items()}
        return found

Spread(memory, "", 8000)
threading.Event().wait()
"""
_PROGRAM: Final = f"{_JOIN}\n{Path(unit.__file__).read_text()}\n{_SERVE}"
_COMMIT: Final = """
import os
run = Run(Path(os.environ["TRAINSYNC_CHECKPOINT_DIR"]), os.environ["TRAINSYNC_RUN_UID"])
run.start()
run.commit({step})
run.stop()
"""


def commit(step: int) -> str:
    """The program that commits a version on the run's volume, for the container of an agent."""
    return f"{Path(runs.__file__).read_text()}\n{_COMMIT.format(step=step)}"


def entry(platform: Platform, run: str, name: str, **changes: Any) -> dict[str, Any]:
    """An entry of servers of two nodes, which are ready before the first version.

    Args:
        changes: of the entry; ``release``: pods with another are replaced.
    """
    image = {"image": platform.images.ray}
    release = {"name": "RELEASE", "value": changes.pop("release", "")}
    engine = {"name": ENGINE, **image, "command": ["python3", "-c", _PROGRAM], "env": [release]}
    # As often as the test looks.
    probe = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1}
    engine["startupProbe"] = {**probe, "failureThreshold": 120}
    agent: dict[str, Any] = {"name": AGENT, **image}
    agent["env"] = [{"name": env.AGENT_SERVE_BEFORE_FIRST_VERSION, "value": "true"}]
    # The run's monitor has no image, and makes no directory.
    claim = {"name": "trainsync-checkpoints", "mountPath": names.CHECKPOINT_MOUNT}
    make = {"name": "make", **image, "volumeMounts": [claim]}
    make["command"] = ["mkdir", "-p", f"{names.CHECKPOINT_MOUNT}/{run}"]
    spec: dict[str, Any] = {"containers": [engine], "initContainers": [make, agent]}
    spec["terminationGracePeriodSeconds"] = 1
    if platform.environment is not None:
        spec["volumes"] = [{"name": ENV_VOLUME, "hostPath": {"path": str(platform.environment)}}]
        mount = {"name": ENV_VOLUME, "mountPath": MOUNT_PATH, "readOnly": True}
        agent["volumeMounts"] = engine["volumeMounts"] = [mount]
    made = {"name": name, "engine": "VLLM", "replicas": 1, "nodes": NODES}
    return {**made, "template": {"spec": spec}, **changes}
