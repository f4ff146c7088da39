"""Reads and patches objects of the API server in this process: a kubectl for each look takes 0.1 s
of a core, which the pods need, and tests look twice a second."""

import base64
import http.client
import json
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

Object = dict[str, Any]
_TIMEOUT = 30.0


@dataclass(frozen=True)
class Kind:
    """Where objects of a kind are."""

    prefix: str
    plural: str
    namespaced: bool

    def path(self, namespace: str) -> str:
        """Of all objects, in ``namespace`` if they are in one."""
        within = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{self.prefix}{within}/{self.plural}"


class ApiReader:
    """GET and PATCH, with the credentials of a kubeconfig that has one cluster and one user.

    Args:
        view: ``kubectl config view --raw --flatten --minify -o json``.
    """

    def __init__(self, view: Mapping[str, Any]) -> None:
        cluster, user = view["clusters"][0]["cluster"], view["users"][0]["user"]
        self._server = urlsplit(cluster["server"])
        authority = cluster.get("certificate-authority-data", "")
        self._tls = ssl.create_default_context(cadata=base64.b64decode(authority).decode() or None)
        if "client-certificate-data" in user:
            with tempfile.TemporaryDirectory() as directory:
                file = Path(directory) / "client.pem"
                for part in ("client-certificate-data", "client-key-data"):
                    with file.open("ab") as pem:
                        pem.write(base64.b64decode(user[part]))
                self._tls.load_cert_chain(file)
        self._headers = {"Accept": "application/json"}
        if "token" in user:
            self._headers["Authorization"] = f"Bearer {user['token']}"
        self._kinds: dict[str, Kind] = {}

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """An object, or None."""
        status, found = self._ask(f"{self._kind(kind).path(namespace)}/{quote(name)}")
        assert status in (200, 404), f"GET {kind} {name}: {status} {found}"
        return found if status == 200 else None

    def list(self, kinds: str, namespace: str, selector: str) -> list[Object]:
        """All objects of a kind, or of several between commas, that a label selector takes."""
        query = urlencode({"labelSelector": selector})
        objects: list[Object] = []
        for kind in kinds.split(","):
            status, found = self._ask(f"{self._kind(kind).path(namespace)}?{query}")
            assert status == 200, f"GET {kind}: {status} {found}"
            # The API server leaves these out of items.
            named = {"apiVersion": found["apiVersion"], "kind": found["kind"].removesuffix("List")}
            objects += [named | item for item in found["items"]]
        return objects

    def patch(self, kind: str, namespace: str, name: str, change: Object, part: str = "") -> Object:
        """Merge ``change`` into an object, or its subresource ``part``; the object then."""
        path = f"{self._kind(kind).path(namespace)}/{quote(name)}" + (f"/{part}" if part else "")
        status, found = self._ask(path, change)
        assert status == 200, f"PATCH {kind} {name}: {status} {found}"
        patched: Object = found
        return patched

    def _kind(self, name: str) -> Kind:
        if name not in self._kinds:
            self._kinds = self._discover()  # CRDs come and go
        assert name in self._kinds, f"the API server has no kind {name}"
        return self._kinds[name]

    def _discover(self) -> dict[str, Kind]:
        groups = self._must("/apis")["groups"]
        prefixes = ["/api/v1", *(f"/apis/{g['preferredVersion']['groupVersion']}" for g in groups)]
        kinds: dict[str, Kind] = {}
        for prefix in prefixes:
            for each in self._must(prefix)["resources"]:
                if "/" in each["name"]:
                    continue  # a subresource
                kind = Kind(prefix, each["name"], each["namespaced"])
                names = (each["name"], each["singularName"], each["kind"].lower())
                full = f"{each['name']}.{prefix.split('/')[2]}"
                for name in (*names, full, *each.get("shortNames", ())):
                    kinds.setdefault(name, kind)
        return kinds

    def _must(self, path: str) -> Any:
        status, found = self._ask(path)
        assert status == 200, f"GET {path}: {status} {found}"
        return found

    def _ask(self, path: str, change: Object | None = None) -> tuple[int, Any]:
        """GET; or a merge patch with ``change``."""
        host, port = self._server.hostname or "", self._server.port
        connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT, context=self._tls)
        method, body, headers = "GET", None, self._headers
        if change is not None:
            method, body = "PATCH", json.dumps(change)
            headers = {**headers, "Content-Type": "application/merge-patch+json"}
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"{method} {path}: {error}") from error
        finally:
            connection.close()
