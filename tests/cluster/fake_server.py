"""Servers that stand in for vLLM, in an entry of spec.servers, beside a real agent."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainsync.api import env
from trainsync_operator.builders.servers.pod import AGENT

from demo.adapt import ENV_VOLUME
from demo.platform import Platform
from images.pod_env import MOUNT_PATH
from tests.unit.agent import fake_server as unit

# What an agent asks of a vLLM server that has taken no version.
_SERVER = """
import http.server, json
ANSWERS = {"/health": {}, "/weight_info": {"weight_version": "default"},
           "/is_paused": {"is_paused": False}}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path in ANSWERS
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWERS.get(self.path)).encode())
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""
# One that takes versions: the program is this checkout's, the pod has torch and trainsync.
_LOADING = """
FakeServer(Path(os.environ["TRAINSYNC_STAGING_MEMORY"]), "", 8000)
threading.Event().wait()
"""


def loading_server(platform: Platform, name: str) -> dict[str, Any]:
    """An entry with one server that takes versions as vLLM does, and generates nothing."""
    source = Path(unit.__file__).read_text()
    return fake_server(platform, name, program=f"import os\n{source}{_LOADING}")


def fake_server(
    platform: Platform,
    name: str,
    release: str = "",
    before: Sequence[dict[str, Any]] = (),
    program: str = _SERVER,
) -> dict[str, Any]:
    """An entry with one server, which is ready before the first version.

    Args:
        release: a pod with another is replaced.
        before: init containers that run before the agent.
        program: of the server.
    """
    image = {"image": platform.images.ray}
    server = {"name": "server", **image, "command": ["python3", "-c", program]}
    agent: dict[str, Any] = {"name": AGENT, **image}
    agent["env"] = [{"name": env.AGENT_SERVE_BEFORE_FIRST_VERSION, "value": "true"}]
    server["env"] = [{"name": "RELEASE", "value": release}]
    spec: dict[str, Any] = {"containers": [server], "initContainers": [*before, agent]}
    spec["terminationGracePeriodSeconds"] = 1
    if platform.environment is not None:
        spec["volumes"] = [{"name": ENV_VOLUME, "hostPath": {"path": str(platform.environment)}}]
        mount = {"name": ENV_VOLUME, "mountPath": MOUNT_PATH, "readOnly": True}
        agent["volumeMounts"] = server["volumeMounts"] = [mount]
    return {"name": name, "engine": "VLLM", "replicas": 1, "template": {"spec": spec}}
