"""A fake API server in memory, test tokens, and a monitor process in a thread."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from trainsync.api import names
from trainsync.api.spec import LogLevel, SyncMethod, Verify
from trainsync.kube.client import KubeError, Object
from trainsync.monitor.page.feed import AGES, MaxAges
from trainsync.monitor.server.app import Process
from trainsync.monitor.server.settings import MonitorServerSettings
from trainsync.storage.objects.bucket import ObjectBucket

from tests.ports import port_of, reserved_port
from tests.waiting import eventually

UID = "11111111-2222-3333-4444-555555555555"
ISSUER = "https://kubernetes.default.svc.cluster.local"
NAMESPACE = "training"


class Signer:
    """A cluster's token key.

    Args:
        private: as `pem` gives it, of the same cluster in another process; None: a new one.
    """

    def __init__(self, key_id: str = "key-1", private: bytes | None = None) -> None:
        self.key_id = key_id
        if private is None:
            self.private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        else:
            loaded = serialization.load_pem_private_key(private, None)
            assert isinstance(loaded, rsa.RSAPrivateKey)
            self.private = loaded

    def pem(self) -> bytes:
        return self.private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def jwks(self) -> Object:
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.private.public_key()))
        return {"keys": [{**public, "kid": self.key_id, "use": "sig", "alg": "RS256"}]}

    def token(self, *, generation: int = 0, uid: str = UID, **changed: Any) -> str:
        """A token as projected by the kubelet; ``changed`` replaces claims, None removes one."""
        claims: dict[str, Any] = {
            "iss": ISSUER,
            "aud": [names.token_audience(uid, generation)],
            "exp": int(time.time()) + 600,
            "nbf": int(time.time()) - 1,
            "sub": f"system:serviceaccount:{NAMESPACE}:default",
            "kubernetes.io": {
                "namespace": NAMESPACE,
                "pod": {"name": "run-main-0-head", "uid": "p"},
                "serviceaccount": {"name": "default", "uid": "s"},
            },
        }
        claims = {k: v for k, v in {**claims, **changed}.items() if v is not None}
        return jwt.encode(claims, self.private, "RS256", headers={"kid": self.key_id})

    def server_token(self, pod: str = "server-0", *, uid: str = UID, **changed: Any) -> str:
        """A token as projected into the pod of an inference server."""
        bound = {"namespace": NAMESPACE, "pod": {"name": pod, "uid": "p"}}
        audience = [names.servers_audience(uid)]
        return self.token(**{"aud": audience, "kubernetes.io": bound, **changed})


class FakeApi:
    """`KubeApi` of one run; `fail` makes every call raise."""

    def __init__(self, signer: Signer) -> None:
        self.signer = signer
        self.fail: KubeError | None = None
        self.run: Object = {
            "metadata": {"uid": UID, "generation": 1},
            "status": {"attempt": 0, "clusters": [{"name": "main", "attempt": 0}]},
        }
        self.lease: Object | None = None
        self.writes: list[tuple[float, Object]] = []
        self.key_fetches = 0
        self.events: list[Object] = []

    def set_status(self, attempt: int, generation: int) -> None:
        self.run = {
            **self.run,
            "status": {"attempt": attempt, "clusters": [{"name": "main", "attempt": generation}]},
        }

    async def get_run(self) -> Object:
        self._check()
        return self.run

    async def apply_status(self, uid: str, status: Object) -> Object:
        self._check()
        if uid != self.run["metadata"]["uid"]:
            raise KubeError(409, "Precondition failed: UID")
        self.writes.append((time.monotonic(), status))
        return self.run

    async def get_lease(self) -> Object | None:
        self._check()
        return self.lease

    async def create_lease(self, lease: Object) -> Object:
        self._check()
        if self.lease is not None:
            raise KubeError(409, "exists")
        self.lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": "1"}}
        return self.lease

    async def replace_lease(self, lease: Object) -> Object:
        self._check()
        assert self.lease is not None
        version = self.lease["metadata"]["resourceVersion"]
        if lease["metadata"].get("resourceVersion") != version:
            raise KubeError(409, "the object has been modified")
        metadata = {**lease["metadata"], "resourceVersion": str(int(version) + 1)}
        self.lease = {**lease, "metadata": metadata}
        return self.lease

    async def create_event(self, event: Object) -> None:
        self._check()
        self.events.append(event)

    async def token_keys(self) -> tuple[str, Object]:
        self._check()
        self.key_fetches += 1
        return ISSUER, self.signer.jwks()

    def _check(self) -> None:
        if self.fail is not None:
            raise self.fail


class RunningMonitor:
    """The whole monitor process with uvicorn, in a thread of the test.

    Args:
        host: its address.
        port: of an earlier one, which keeps it for this one also when it has ended; 0: a new one.
    """

    def __init__(
        self,
        api: FakeApi,
        directory: Path | None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        page_ages: MaxAges = AGES,
        bucket: ObjectBucket | None = None,
        sync_method: SyncMethod = SyncMethod.CHECKPOINT,
        verify: Verify = Verify.DIGEST,
    ) -> None:
        # It is closed with this object: in a test the next one is there by then.
        self._reservation = reserved_port(port)
        self._host = host
        settings = MonitorServerSettings(
            run_name="run",
            namespace=NAMESPACE,
            run_uid=UID,
            directory=directory,
            max_to_keep=None,
            verify=verify,
            lag_allowed=1,
            log_level=LogLevel.INFO,
            identity="monitor-pod",
            store=None if bucket is None else bucket.name,
            sync_method=sync_method,
        )
        self.process = Process(
            settings,
            api,
            host=host,
            port=port_of(self._reservation),
            page_ages=page_ages,
            bucket=bucket,
        )
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        eventually(lambda: self.process.port is not None or not self._thread.is_alive())

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.process.port}"

    def stop(self) -> None:
        self.process.stop()
        self.join()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive(), "the monitor did not end"

    def _run(self) -> None:
        try:
            asyncio.run(self.process.run())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
