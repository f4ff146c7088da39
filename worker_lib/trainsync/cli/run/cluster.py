"""The command line's one client of the API server: every call has a deadline."""

import asyncio
import difflib
import json
from typing import Any, Final

from trainsync.api import names
from trainsync.cli.output.console import REFUSED, USAGE
from trainsync.cli.run import errors
from trainsync.cli.run.kubeconfig import ClusterConnection
from trainsync.kube.answers import message_in

Object = dict[str, Any]

REQUEST_SECONDS: Final = 15.0
_CONNECT_SECONDS: Final = 8.0
_PAGE: Final = 500
_MOST_PAGES: Final = 20
_NAMES_SHOWN: Final = 8
_LONGEST_ANSWER: Final = 64 << 20
_METADATA_ONLY: Final = (
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
)


class ClusterClient:
    """One namespace. Every method may raise `errors.ClusterError`."""

    def __init__(self, connection: ClusterConnection) -> None:
        self._client = connection.client
        self._host = connection.host
        self.context = connection.context
        self.namespace = connection.namespace

    async def run(self, name: str) -> Object:
        """A TrainingRun as it is.

        Raises:
            errors.MissingError: there is none of that name; the message names those that are.
        """
        try:
            return await self.get(f"{self._runs_path}/{name}", f"TrainingRun {name}")
        except errors.MissingError:
            there = await self.run_names()
        raise errors.MissingError(
            _no_run(self.namespace, name, there, await self._elsewhere(name)), USAGE
        )

    async def runs(self) -> list[Object]:
        """The namespace's TrainingRuns, by name."""
        try:
            found = await self.items(self._runs_path, "TrainingRuns")
        except errors.MissingError:
            raise errors.not_installed(self.context) from None
        return sorted(found, key=lambda run: str(run["metadata"]["name"]))

    async def run_names(self) -> list[str]:
        """Their names alone, which costs little."""
        try:
            found = await self.items(self._runs_path, "TrainingRuns", accept=_METADATA_ONLY)
        except errors.MissingError:
            raise errors.not_installed(self.context) from None
        return sorted(str(run["metadata"]["name"]) for run in found)

    async def events(self) -> list[Object]:
        """All Events of the namespace."""
        return await self.items(f"/api/v1/namespaces/{self.namespace}/events", "events")

    async def change_spec(self, name: str, change: Object) -> Object:
        """Merge ``change`` into a TrainingRun's spec; the run after that."""
        path, what = f"{self._runs_path}/{name}", f"TrainingRun {name}"
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await self._ask(path, what, {}, "application/json", {"spec": change})
                try:
                    return await self._document(answer, what)
                finally:
                    answer.release()
        except TimeoutError as error:
            why = f"not within {REQUEST_SECONDS:g} s"
            raise errors.not_reached(self._host, why) from error

    async def get(self, path: str, what: str, query: dict[str, str] | None = None) -> Object:
        """A JSON document."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await self._ask(path, what, query or {}, "application/json")
                try:
                    return await self._document(answer, what)
                finally:
                    answer.release()
        except TimeoutError as error:
            why = f"not within {REQUEST_SECONDS:g} s"
            raise errors.not_reached(self._host, why) from error

    async def items(
        self,
        path: str,
        what: str,
        query: dict[str, str] | None = None,
        *,
        accept: str = "application/json",
    ) -> list[Object]:
        """All items of a list, page by page, 10,000 at most."""
        found: list[Object] = []
        given = {**(query or {}), "limit": str(_PAGE)}
        try:
            for _ in range(_MOST_PAGES):
                async with asyncio.timeout(REQUEST_SECONDS):
                    answer = await self._ask(path, what, given, accept)
                    try:
                        page = await self._document(answer, what)
                    finally:
                        answer.release()
                found += page.get("items") or []
                token = (page.get("metadata") or {}).get("continue")
                if not token:
                    break
                given["continue"] = str(token)
        except TimeoutError as error:
            why = f"not within {REQUEST_SECONDS:g} s"
            raise errors.not_reached(self._host, why) from error
        return found

    @property
    def _runs_path(self) -> str:
        return f"/apis/{names.API_VERSION}/namespaces/{self.namespace}/{names.PLURAL}"

    async def _ask(
        self, path: str, what: str, query: dict[str, str], accept: str, patch: Object | None = None
    ) -> Any:
        """The answer to a read, or to a merge patch."""
        import aiohttp

        headers = {"Accept": accept, "User-Agent": "trainsync-cli"}
        if patch is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            request = await self._client.param_serialize(
                "GET" if patch is None else "PATCH",
                path,
                path_params={},
                query_params=list(query.items()),
                header_params=headers,
                body=patch,
                post_params=[],
                files={},
                auth_settings=["BearerToken"],
            )
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
            response = await self._client.call_api(*request, _request_timeout=timeout)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise errors.not_reached(self._host, why) from error
        answer = response.response
        if answer.status >= 300:
            try:
                body = await answer.content.read(1 << 16)
            except (aiohttp.ClientError, OSError) as error:
                raise errors.not_reached(self._host, f"{what}: cut short: {error}") from error
            finally:
                answer.close()
            doing = "read" if patch is None else "change"
            raise errors.refused(answer.status, _message(body), what, self.namespace, doing)
        return answer

    async def _document(self, answer: Any, what: str) -> Object:
        import aiohttp

        try:
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > _LONGEST_ANSWER:
                    raise errors.ClusterError(
                        f"{what}: the answer has over {_LONGEST_ANSWER} bytes"
                    )
            found = json.loads(bytes(body))
        except (aiohttp.ClientError, OSError) as error:
            raise errors.not_reached(self._host, f"{what}: cut short: {error}") from error
        except ValueError as error:
            raise errors.ClusterError(f"{what}: no JSON came: {error}", REFUSED) from error
        if not isinstance(found, dict):
            raise errors.ClusterError(f"{what}: expected a JSON object, got {type(found).__name__}")
        return found

    async def _elsewhere(self, name: str) -> list[str]:
        """Namespaces with a run of that name, as far as one may know."""
        try:
            found = await self.items(
                f"/apis/{names.API_VERSION}/{names.PLURAL}",
                "TrainingRuns",
                {"fieldSelector": f"metadata.name={name}"},
                accept=_METADATA_ONLY,
            )
        except errors.ClusterError:
            return []  # it would only have been a hint
        return sorted(str(run["metadata"]["namespace"]) for run in found)


def _no_run(namespace: str, name: str, there: list[str], elsewhere: list[str]) -> str:
    text = f"there is no TrainingRun {name} in namespace {namespace}"
    if elsewhere:
        return f"{text}, but one in {', '.join(elsewhere[:_NAMES_SHOWN])}: give -n NAMESPACE"
    if not there:
        return f"{text}, nor any other: give -n NAMESPACE, or see `kubectl get trainingruns -A`"
    close = difflib.get_close_matches(name, there, n=1)
    shown = ", ".join(there[:_NAMES_SHOWN])
    more = f" and {len(there) - _NAMES_SHOWN} more" if len(there) > _NAMES_SHOWN else ""
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"{text}; there is {shown}{more}{meant}"


def _message(body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())[:300]
    return message_in(body, text or "without a reason")
