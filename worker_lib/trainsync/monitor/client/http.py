"""`MonitorClient` over HTTP, for pods: deadlines, bounded retries, a token that rotates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import httpx

from trainsync.api import names
from trainsync.api.base import Model
from trainsync.api.protocol import (
    ClaimRequest,
    CommitAnswer,
    CommitNotice,
    DamageReport,
    FailureReport,
    LoadReport,
    PermitAnswer,
    PermitRequest,
    ProgressReport,
    ReceiptHint,
    RenewRequest,
    ResumeAnswer,
    ResumePoint,
    SaveKind,
    SaveRequest,
    SaveStatus,
    ServersAnswer,
    StopNews,
    StopNotice,
    StopPoll,
    SynchronizerAnswers,
    SynchronizerCall,
    SynchronizerCalls,
    SynchronizerReply,
    WeightsReport,
)
from trainsync.api.status import ServerWeights
from trainsync.monitor.client.requests import Requests, parse
from trainsync.monitor.client.resume_wait import until_verified
from trainsync.monitor.client.retry import RetryPolicy

ModelT = TypeVar("ModelT", bound=Model)

LONGEST_WAIT_SECONDS: Final = 30.0


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
        self._url = url
        self._token_file = token_file
        headers = {names.HEADER_ATTEMPT: str(attempt), names.HEADER_INCARNATION: incarnation}
        self._requests = Requests(
            url, headers, token_file, connect_seconds=self._settings.connect_seconds
        )

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

    def renew(self, successor: str, reason: str) -> "HttpMonitorClient":
        """See `RenewalClient`."""
        body = RenewRequest(successor=successor, reason=reason)
        self._call(
            "POST",
            "/v1/renewals",
            body,
            retry=self._settings.claim_retry,
            read_seconds=self._settings.claim_read_seconds,
        )
        return HttpMonitorClient(
            self._url,
            attempt=self._attempt,
            incarnation=successor,
            token_file=self._token_file,
            settings=self._settings,
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

    def report_load(self, report: LoadReport) -> None:
        """See `MonitorClient`."""
        self._call("POST", "/v1/loads", report, retry=self._settings.report_retry)

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

    def server_weights(self) -> tuple[ServerWeights, ...]:
        """See `ServerWeightsClient`."""
        answer = self._call("GET", "/v1/inference-servers", retry=self._settings.report_retry)
        return tuple(self._parse(ServersAnswer, answer).servers)

    def close(self) -> None:
        """Close connections; later calls raise `ClientClosedError`."""
        self._requests.close()

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
        return self._requests.send(
            method,
            path,
            body,
            params=params,
            retry=retry or self._settings.retry,
            read_seconds=read_seconds or self._settings.read_seconds,
        )

    @staticmethod
    def _parse(model: type[ModelT], answer: httpx.Response) -> ModelT:
        return parse(model, answer)
