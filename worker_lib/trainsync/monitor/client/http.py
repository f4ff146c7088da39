"""`MonitorClient` over HTTP, for pods: deadlines, bounded retries, a token that rotates."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import httpx
from pydantic import ValidationError

from trainsync.api import names
from trainsync.api.base import Model
from trainsync.api.protocol import (
    ClaimRequest,
    CommitAnswer,
    CommitNotice,
    DamageReport,
    ErrorBody,
    FailureReport,
    PermitAnswer,
    PermitRequest,
    ProgressReport,
    ReceiptHint,
    ResumeAnswer,
    ResumePoint,
    SaveKind,
    SaveRequest,
    SaveStatus,
    StopNews,
    StopNotice,
    StopPoll,
    SynchronizerAnswers,
    SynchronizerCall,
    SynchronizerCalls,
    SynchronizerReply,
    WeightsReport,
)
from trainsync.monitor import errors
from trainsync.monitor.client.resume_wait import until_verified
from trainsync.monitor.client.retry import RetryPolicy

ModelT = TypeVar("ModelT", bound=Model)

LONGEST_WAIT_SECONDS: Final = 30.0
_RETRIED: Final = (
    errors.MonitorUnavailableError,
    errors.NotReadyError,
    errors.NotYetError,
    errors.StorageUnavailableError,
)


@dataclass(frozen=True)
class HttpSettings:
    """Deadlines of one request, and how often and how long it is repeated.

    A claim is patient: at the start of a job the monitor pod may still be starting, or be
    checking the last save of the attempt before.
    """

    connect_seconds: float = 5.0
    read_seconds: float = 20.0
    claim_read_seconds: float = 120.0
    call_read_seconds: float = 5.0  # explorers that are not heard for 30 s are lost
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    report_retry: RetryPolicy = field(
        default_factory=lambda: RetryPolicy(attempts=2, deadline_seconds=10.0)
    )
    call_retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(attempts=1))
    claim_retry: RetryPolicy = field(
        default_factory=lambda: RetryPolicy(attempts=120, deadline_seconds=300.0)
    )


class HttpMonitorClient:
    """Speaks to a run's monitor service.

    Retried, within bounds: no connection, a broken answer, 5xx, and 425. Everything else is a
    `MonitorError` at once. Every message is idempotent, so repeating one is safe.
    """

    def __init__(
        self,
        url: str,
        *,
        attempt: int,
        incarnation: str,
        token_file: Path | None,
        settings: HttpSettings | None = None,
    ) -> None:
        self._settings = settings or HttpSettings()
        self._attempt = attempt
        self._incarnation = incarnation
        self._token_file = token_file
        self._url = url
        self._client = httpx.Client(
            base_url=url, timeout=self._timeout(self._settings.read_seconds), trust_env=False
        )
        self._closed = threading.Event()

    @property
    def attempt(self) -> int:
        """The attempt this client speaks for."""
        return self._attempt

    @property
    def incarnation(self) -> str:
        """The incarnation this client speaks for."""
        return self._incarnation

    def claim(self, cluster: str) -> None:
        """See `MonitorClient`; blocks at most about seven minutes."""
        body = ClaimRequest(attempt=self._attempt, incarnation=self._incarnation, cluster=cluster)
        self._call(
            "POST",
            "/v1/claims",
            body,
            retry=self._settings.claim_retry,
            read_seconds=self._settings.claim_read_seconds,
        )

    def register(self, request: SaveRequest) -> SaveStatus:
        """See `MonitorClient`."""
        return self._parse(SaveStatus, self._call("POST", "/v1/saves", request))

    def receipt(self, hint: ReceiptHint) -> None:
        """See `MonitorClient`."""
        self._call("POST", "/v1/receipts", hint)

    def failure(self, report: FailureReport) -> None:
        """See `MonitorClient`."""
        self._call("POST", "/v1/failures", report)

    def save_status(self, kind: SaveKind, step: int, wait_seconds: float = 0.0) -> SaveStatus:
        """See `MonitorClient`."""
        wait = min(max(wait_seconds, 0.0), LONGEST_WAIT_SECONDS)
        answer = self._call(
            "GET",
            f"/v1/saves/{kind.value}/{step}",
            params={"wait": f"{wait:g}"},
            read_seconds=self._settings.read_seconds + wait,
        )
        return self._parse(SaveStatus, answer)

    def newer_commit(
        self, kind: SaveKind, after: tuple[int, int], wait_seconds: float = 0.0
    ) -> CommitNotice | None:
        """See `CommitClient`."""
        wait = min(max(wait_seconds, 0.0), LONGEST_WAIT_SECONDS)
        attempt, step = after
        answer = self._call(
            "GET",
            f"/v1/commits/{kind.value}",
            params={
                "after_attempt": str(attempt),
                "after_step": str(step),
                "wait": f"{wait:g}",
            },
            read_seconds=self._settings.read_seconds + wait,
        )
        return self._parse(CommitAnswer, answer).commit

    def resume(self) -> ResumePoint | None:
        """See `MonitorClient`."""

        def ask(wait: float) -> ResumePoint | None:
            answer = self._call(
                "GET",
                "/v1/resume",
                params={"wait": f"{wait:g}"},
                retry=self._settings.claim_retry,
                read_seconds=self._settings.claim_read_seconds + wait,
            )
            return self._parse(ResumeAnswer, answer).point

        return until_verified(ask)

    def report_damage(self, report: DamageReport) -> None:
        """See `MonitorClient`."""
        self._call("POST", "/v1/damage", report, retry=self._settings.report_retry)

    def write_permit(self, request: PermitRequest, wait_seconds: float = 0.0) -> PermitAnswer:
        """See `PermitClient`."""
        wait = min(max(wait_seconds, 0.0), LONGEST_WAIT_SECONDS)
        answer = self._call(
            "POST",
            "/v1/permits",
            request,
            params={"wait": f"{wait:g}"},
            read_seconds=self._settings.read_seconds + wait,
        )
        return self._parse(PermitAnswer, answer)

    def release_permit(self, holder: str) -> None:
        """See `PermitClient`."""
        self._call("DELETE", f"/v1/permits/{holder}", retry=self._settings.report_retry)

    def report_progress(self, report: ProgressReport) -> None:
        """See `MonitorClient`."""
        self._call("POST", "/v1/progress", report, retry=self._settings.report_retry)

    def report_weights(self, report: WeightsReport) -> None:
        """See `MonitorClient`."""
        self._call("POST", "/v1/weights", report, retry=self._settings.report_retry)

    def poll_stop(self, poll: StopPoll, wait_seconds: float = 0.0) -> StopNotice | None:
        """See `StopClient`."""
        wait = min(max(wait_seconds, 0.0), LONGEST_WAIT_SECONDS)
        answer = self._call(
            "POST",
            "/v1/stop",
            poll,
            params={"wait": f"{wait:g}"},
            retry=self._settings.report_retry,
            read_seconds=self._settings.read_seconds + wait,
        )
        return self._parse(StopNews, answer).notice

    def call_synchronizer(
        self, call: SynchronizerCall, wait_seconds: float = 0.0
    ) -> SynchronizerReply:
        """See `ExchangeClient`."""
        path = "/v1/synchronizer/calls"
        answer = self._ask("POST", path, call, {}, wait_seconds)
        return self._parse(SynchronizerReply, answer)

    def synchronizer_calls(
        self, epoch: str, after: int, wait_seconds: float = 0.0
    ) -> SynchronizerCalls:
        """See `ExchangeClient`."""
        known = {"epoch": epoch, "after": str(after)}
        answer = self._ask("GET", "/v1/synchronizer/calls", None, known, wait_seconds)
        return self._parse(SynchronizerCalls, answer)

    def answer_synchronizer(self, answers: SynchronizerAnswers) -> None:
        """See `ExchangeClient`."""
        self._ask("POST", "/v1/synchronizer/answers", answers, {}, None)

    def close(self) -> None:
        """Close connections; later calls raise `ClientClosedError`."""
        self._closed.set()
        self._client.close()

    def _ask(
        self,
        method: str,
        path: str,
        body: Model | None,
        params: Mapping[str, str],
        wait_seconds: float | None,
    ) -> httpx.Response:
        """One request, which waits for so long at the monitor if it can."""
        wait = min(max(wait_seconds or 0.0, 0.0), LONGEST_WAIT_SECONDS)
        return self._call(
            method,
            path,
            body,
            params=params if wait_seconds is None else {**params, "wait": f"{wait:g}"},
            retry=self._settings.call_retry,
            read_seconds=self._settings.call_read_seconds + wait,
        )

    def _call(
        self,
        method: str,
        path: str,
        body: Model | None = None,
        *,
        params: Mapping[str, str] | None = None,
        retry: RetryPolicy | None = None,
        read_seconds: float | None = None,
    ) -> httpx.Response:
        # By hand rather than httpx's json=: a NaN loss is news, and must reach the monitor.
        content = None if body is None else json.dumps(body.to_json_dict()).encode()
        timeout = self._timeout(read_seconds or self._settings.read_seconds)

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

        return (retry or self._settings.retry).run(once, _RETRIED)

    def _headers(self) -> dict[str, str]:
        headers = {
            names.HEADER_ATTEMPT: str(self._attempt),
            names.HEADER_INCARNATION: self._incarnation,
            "Content-Type": "application/json",
        }
        if self._token_file is not None:
            # Read each time: the kubelet replaces the token long before it expires.
            try:
                token = self._token_file.read_text().strip()
            except OSError as error:
                raise errors.UnauthenticatedError(
                    f"the token for the monitor cannot be read: {error}"
                ) from error
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _timeout(self, read_seconds: float) -> httpx.Timeout:
        return httpx.Timeout(read_seconds, connect=self._settings.connect_seconds)

    @staticmethod
    def _parse(model: type[ModelT], answer: httpx.Response) -> ModelT:
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
