"""A few requests to the API server over TLS with the administrator's certificate.

kubectl would be too slow: an ``up`` of a running cluster must answer in well under two seconds, and
the volume reclaimer polls every second; kubectl is a 60 MB program.
"""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any

from devcluster.paths import API_PORT, Cluster


class ApiError(Exception):
    """The API server did not answer, or not with success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; 0 without an answer."""


@dataclass(frozen=True)
class KubeApi:
    """A client that opens a new connection for each request."""

    cluster: Cluster
    timeout: float = 5

    def get(self, path: str) -> Any:
        """GET a JSON document. Raises ApiError."""
        return json.loads(self.request("GET", path))

    def merge_patch(self, path: str, patch: dict[str, Any]) -> Any:
        """JSON merge patch. Raises ApiError (status 409 if the resourceVersion in it is old)."""
        return json.loads(self.request("PATCH", path, patch, "application/merge-patch+json"))

    def ready(self) -> bool:
        """Whether the API server reports that it is ready."""
        try:
            return self.request("GET", "/readyz") == b"ok"
        except ApiError:
            return False

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> bytes:
        pki = self.cluster.pki
        try:
            context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
            context.load_cert_chain(str(pki / "admin.crt"), str(pki / "admin.key"))
            connection = http.client.HTTPSConnection(
                self.cluster.address, API_PORT, timeout=self.timeout, context=context
            )
            try:
                connection.request(
                    method,
                    path,
                    body=None if body is None else json.dumps(body),
                    headers={"Accept": "application/json", "Content-Type": content_type},
                )
                response = connection.getresponse()
                content = response.read()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(
                0, f"{method} {path}: no answer from {self.cluster.server}: {error}"
            ) from error
        if response.status >= 300:
            text = content.decode(errors="replace")[:500]
            raise ApiError(response.status, f"{method} {path}: HTTP {response.status}: {text}")
        return content
