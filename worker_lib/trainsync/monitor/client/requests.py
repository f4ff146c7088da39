"""Requests to a monitor over HTTP: deadlines, bounded retries, a token that rotates."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import httpx
from pydantic import ValidationError

from trainsync.api.base import Model
from trainsync.api.protocol import ErrorBody
from trainsync.monitor import errors
from trainsync.monitor.client.retry import RetryPolicy

ModelT = TypeVar("ModelT", bound=Model)

_RETRIED: Final = (
    errors.MonitorUnavailableError,
    errors.NotReadyError,
    errors.NotYetError,
    errors.StorageUnavailableError,
)


class Requests:
    """Connections to one monitor; for several threads.

    Args:
        headers: of every request.
        token_file: read for each request: the kubelet replaces the token long before it expires.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        token_file: Path | None,
        *,
        connect_seconds: float,
    ) -> None:
        self._url = url
        self._own = {**headers, "Content-Type": "application/json"}
        self._token_file = token_file
        self._connect_seconds = connect_seconds
        self._client = httpx.Client(base_url=url, trust_env=False)
        self._closed = threading.Event()

    def send(
        self,
        method: str,
        path: str,
        body: Model | None = None,
        *,
        params: Mapping[str, str] | None = None,
        retry: RetryPolicy,
        read_seconds: float,
    ) -> httpx.Response:
        """The answer to one request, repeated within ``retry``.

        Raises:
            MonitorError: it was refused, or not answered.
        """
        # By hand rather than httpx's json=: a NaN loss is news, and must reach the monitor.
        content = None if body is None else json.dumps(body.to_json_dict()).encode()
        timeout = httpx.Timeout(read_seconds, connect=self._connect_seconds)

        def once() -> httpx.Response:
            if self._closed.is_set():
                raise errors.ClientClosedError("this client of the monitor is closed")
            try:
                answer = self._client.request(
                    method,
                    path,
                    content=content,
                    params=params,
                    headers=self._headers(),
                    timeout=timeout,
                )
            except httpx.HTTPError as error:
                raise errors.MonitorUnavailableError(
                    f"{method} {self._url}{path}: {type(error).__name__}: {error}"
                ) from error
            if answer.is_success:
                return answer
            raise _refusal(answer)

        return retry.run(once, _RETRIED)

    def close(self) -> None:
        """Close connections; later requests raise `ClientClosedError`."""
        self._closed.set()
        self._client.close()

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return self._own
        try:
            token = self._token_file.read_text().strip()
        except OSError as error:
            raise errors.UnauthenticatedError(
                f"the token for the monitor cannot be read: {error}"
            ) from error
        return {**self._own, "Authorization": f"Bearer {token}"}


def parse(model: type[ModelT], answer: httpx.Response) -> ModelT:
    """The answer as a model.

    Raises:
        MonitorError: it is none.
    """
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise errors.MonitorError(
            f"{answer.request.url}: the answer is not a {model.__name__}: {error}"
        ) from error


def _refusal(answer: httpx.Response) -> errors.MonitorError:
    where = f"{answer.request.method} {answer.request.url}"
    try:
        body = ErrorBody.model_validate_json(answer.content)
    except ValidationError:
        body = ErrorBody(code="", message=answer.text[:200])
    kind = errors.BY_CODE.get(body.code)
    if kind is None and answer.status_code >= 500:
        kind = errors.MonitorUnavailableError
    message = f"{where}: {answer.status_code}: {body.message}"
    if answer.status_code == 404:
        kind = errors.NotServedError
    return (kind or errors.MonitorError)(message)
