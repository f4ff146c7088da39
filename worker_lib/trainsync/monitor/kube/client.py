"""The monitor's one client of the API server: plain dicts, a deadline on every call."""

import json
from typing import Any, Final, Protocol

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient

from trainsync.api import names
from trainsync.kube.client import KubeError, Object, message_of
from trainsync.kube.lease import LeaseStore

REQUEST_SECONDS: Final = 10.0
# The operator writes its part of the status, between our read and our write.
_STATUS_TRIES: Final = 4


class KubeApi(LeaseStore, Protocol):
    """The monitor's calls of the API server. Every call may raise `KubeError`."""

    async def get_run(self) -> Object:
        """The TrainingRun as it is."""
        ...

    async def apply_status(self, uid: str, status: Object) -> Object:
        """Apply the monitor's part of the run's status; 409 when the run has another uid, alone."""
        ...

    async def create_event(self, event: Object) -> None:
        """Post an Event about the run."""
        ...

    async def token_keys(self) -> tuple[str, Object]:
        """Issuer of ServiceAccount tokens, and its JWKS."""
        ...


class ClusterApi:
    """`KubeApi` of one run over the official client."""

    def __init__(
        self, api_client: kubernetes_client.ApiClient, *, namespace: str, run: str
    ) -> None:
        self._dynamic = DynamicClient(api_client)  # type: ignore[no-untyped-call]  # kubernetes is untyped
        self._namespace = namespace
        self._run = run
        run_group = f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}"
        self._run_path = f"{run_group}/{run}"
        self._leases_path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._events_path = f"/api/v1/namespaces/{namespace}/events"
        # The run's resourceVersion as it was seen last, with the uid that was asked for.
        self._version: str | None = None

    async def get_run(self) -> Object:
        """See `KubeApi`."""
        return await self._request("get", self._run_path)

    async def apply_status(self, uid: str, status: Object) -> Object:
        """See `KubeApi`.

        The resourceVersion keeps the write from a namesake made later: server-side apply of a
        status does not look at the uid.
        """
        for _ in range(_STATUS_TRIES):
            if self._version is None:
                self._version = await self._version_of(uid)
            try:
                applied = await self._apply_status(self._version, status)
            except KubeError as error:
                self._version = None
                if error.status != 409:
                    raise
            else:
                self._version = str(applied["metadata"]["resourceVersion"])
                return applied
        raise KubeError(None, f"the run changed between {_STATUS_TRIES} reads and writes")

    async def _version_of(self, uid: str) -> str:
        metadata = (await self.get_run())["metadata"]
        if metadata["uid"] != uid:
            raise KubeError(409, f"the run has uid {metadata['uid']}, and not {uid}")
        return str(metadata["resourceVersion"])

    async def _apply_status(self, version: str, status: Object) -> Object:
        metadata = {
            "name": self._run,
            "namespace": self._namespace,
            "resourceVersion": version,
        }
        return await self._request(
            "patch",
            f"{self._run_path}/status",
            body={
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "metadata": metadata,
                "status": status,
            },
            content_type="application/apply-patch+yaml",
            field_manager=names.MONITOR_FIELD_MANAGER,
            force_conflicts=True,
        )

    async def get_lease(self) -> Object | None:
        """See `KubeApi`."""
        try:
            return await self._request(
                "get", f"{self._leases_path}/{names.monitor_name(self._run)}"
            )
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def create_lease(self, lease: Object) -> Object:
        """See `KubeApi`."""
        return await self._request("post", self._leases_path, body=lease)

    async def replace_lease(self, lease: Object) -> Object:
        """See `KubeApi`."""
        path = f"{self._leases_path}/{lease['metadata']['name']}"
        return await self._request("put", path, body=lease)

    async def create_event(self, event: Object) -> None:
        """See `KubeApi`."""
        await self._request("post", self._events_path, body=event)

    async def token_keys(self) -> tuple[str, Object]:
        """See `KubeApi`."""
        issuer = await self._request("get", "/.well-known/openid-configuration")
        keys = await self._request(
            "get",
            "/openid/v1/jwks",
            header_params={"Accept": "application/jwk-set+json, application/json"},
        )
        return str(issuer["issuer"]), keys

    async def _request(self, method: str, path: str, **arguments: Any) -> Object:
        try:
            answer = await self._dynamic.request(
                method,
                path,
                _request_timeout=REQUEST_SECONDS,
                serialize=False,
                **arguments,
            )
            data: Object = json.loads(await answer.read())
        except ApiException as error:
            status = int(error.status or 0)
            raise KubeError(status, f"API server answered {status}: {message_of(error)}") from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise KubeError(
                None, f"API server not reached: {str(error) or type(error).__name__}"
            ) from error
        return data
