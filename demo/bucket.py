"""A bucket on this machine for a run without a volume: its server, its keys, what is in it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trainsync.api import names

from demo.errors import DemoError
from demo.kubectl import Object
from demo.platform import devcluster_name, own_cluster
from devcluster import lifecycle, object_store
from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers

BUCKET = "checkpoints"
KEYS = "trainsync-demo-bucket"
"""The Kubernetes Secret with the bucket's keys."""
_VERIFY_SECONDS = 120


@dataclass(frozen=True)
class Bucket:
    """A bucket that this machine and the pods of its development cluster reach."""

    endpoint: str
    access: str
    secret: str = field(repr=False)

    def secret_object(self) -> Object:
        """The Secret `KEYS`."""
        keys = {"AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret}
        metadata = {"name": KEYS}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys}

    def url(self, run: str) -> str:
        """Where the checkpoints of a run are."""
        return f"s3://{BUCKET}/{run}"

    def storage(self, run: str) -> Object:
        """`spec.checkpoint.storage` of a run: this bucket, and no volume."""
        store = {
            "url": self.url(run),
            "endpoint": self.endpoint,
            "region": object_store.REGION,
            "allowHttp": True,
            "credentials": {"secretRef": {"name": KEYS}},
        }
        return {"objectStore": store}

    def fit(self, run: Object) -> Object:
        """A copy of a TrainingRun whose checkpoints are in this bucket."""
        storage = self.storage(str(run["metadata"]["name"]))
        checkpoint = {**run["spec"]["checkpoint"], "storage": storage}
        return {**run, "spec": {**run["spec"], "checkpoint": checkpoint}}

    def verify(self, run: str) -> str:
        """What `trainsync checkpoints verify --json` says of the run's checkpoints.

        Raises DemoError when the command says nothing.
        """
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": self.access,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": object_store.REGION,
            "AWS_ALLOW_HTTP": "true",
        }
        program = str(Path(sys.executable).with_name("trainsync"))
        words = [program, "checkpoints", "verify", self.url(run), "--json"]
        try:
            done = subprocess.run(
                words,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_VERIFY_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            shown = f"trainsync checkpoints verify {self.url(run)}"
            raise DemoError(f"`{shown}` did not end within {_VERIFY_SECONDS} s") from error
        if not done.stdout:
            raise DemoError(done.stderr.strip()[-2000:])
        return done.stdout


@contextmanager
def serving() -> Iterator[Bucket]:
    """A new and empty bucket for as long as the body runs. Raises DemoError, DevclusterError."""
    kubeconfig = os.environ.get("KUBECONFIG")
    if own_cluster(kubeconfig):
        raise DemoError(
            "KUBECONFIG is a cluster of yours, whose pods do not reach a bucket on this machine:"
            " leave --store out, or give a --manifest with the bucket of yours"
            f" (spec.checkpoint.storage.objectStore of a {names.KIND})"
        )
    host = lifecycle.require_record(devcluster_name(kubeconfig)).cluster.host_address
    program = ensure_store_servers(Progress()).path("versitygw")
    access, secret = f"demo{secrets.token_hex(8)}", secrets.token_hex(20)
    with tempfile.TemporaryDirectory(prefix="trainsync-demo-") as directory:
        root = Path(directory) / "buckets"
        (root / BUCKET).mkdir(parents=True)
        port = object_store.free_port(host)
        with object_store.serving(program, root, host, port, access, secret):
            yield Bucket(f"http://{host}:{port}", access, secret)
