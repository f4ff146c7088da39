"""Requests without a valid token or with a wrong body, and a client without a monitor."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from trainsync.api import names
from trainsync.monitor import errors

from tests.unit.monitor.asking import sent
from tests.unit.monitor.fakes import RunningMonitor, Signer
from tests.unit.monitor.saves import FIRST
from tests.unit.monitor.server.clients import Clients


def test_every_route_under_v1_needs_a_token_and_health_needs_none(monitor: RunningMonitor) -> None:
    for method, path in (
        ("POST", "claims"), ("POST", "saves"), ("GET", "saves/checkpoint/1"), ("POST", "receipts"),
        ("POST", "failures"), ("GET", "resume"), ("POST", "progress"), ("POST", "weights"),
        ("GET", "nothing"),
    ):  # fmt: skip
        assert httpx.request(method, f"{monitor.url}/v1/{path}").status_code == 401, path
    for path in ("healthz", "readyz", "metrics"):
        assert httpx.get(f"{monitor.url}/{path}").status_code == 200
    assert httpx.get(f"{monitor.url}/nothing").status_code == 404


def test_a_rotated_token_is_used_at_once(
    clients: Clients, token_file: Path, signer: Signer
) -> None:
    client = clients()
    client.claim("main")
    token_file.write_text(signer.token(exp=1))
    with pytest.raises(errors.UnauthenticatedError, match="expired"):
        client.resume()
    token_file.write_text(signer.token())
    assert client.resume() is None
    token_file.unlink()
    with pytest.raises(errors.UnauthenticatedError, match="cannot be read"):
        client.resume()


def test_a_wrong_body_is_refused_by_field(monitor: RunningMonitor, signer: Signer) -> None:
    headers = {
        "Authorization": f"Bearer {signer.token()}",
        names.HEADER_ATTEMPT: "0",
        names.HEADER_INCARNATION: FIRST.incarnation,
    }

    def post(path: str, body: object, **changed: str) -> tuple[int, str]:
        answer = httpx.post(
            f"{monitor.url}/v1/{path}",
            content=body if isinstance(body, bytes) else json.dumps(body),
            headers={**headers, "Content-Type": "application/json", **changed},
        )
        return answer.status_code, answer.json()["message"]

    claim = {"attempt": 0, "incarnation": FIRST.incarnation, "cluster": "main"}
    assert "attempt" in post("claims", {**claim, "attempt": -1})[1]
    assert "incarnation" in post("claims", {**claim, "incarnation": "../../x"})[1]
    assert "surprise" in post("claims", {**claim, "surprise": 1})[1]
    save = {"kind": "checkpoint", "step": 1, "participants": []}
    assert "participants" in post("saves", save)[1]
    assert "kind" in post("saves", {**save, "kind": "other"})[1]
    assert post("saves", b"{")[0] == 422
    metrics_body = {"step": 1, "metrics": {"x" * 200: 1.0}}
    assert post("progress", metrics_body)[0] == 422
    resume = {k: v for k, v in headers.items() if k != names.HEADER_ATTEMPT}
    answer = httpx.get(f"{monitor.url}/v1/resume", headers=resume)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert sent(monitor, signer.token(), **{names.HEADER_ATTEMPT: "-1"}).status_code == 422


def test_a_body_without_end_is_cut_off(monitor: RunningMonitor, signer: Signer) -> None:
    headers = {"Authorization": f"Bearer {signer.token()}"}

    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * (1 << 20)

    for content in (b" " * (5 << 20), endless()):
        try:
            answer = httpx.post(f"{monitor.url}/v1/progress", content=content, headers=headers)
        except httpx.WriteError:
            continue  # it hung up on us, which is as good
        assert answer.status_code == 413


def test_the_client_gives_up_after_its_bounds_and_says_where(token_file: Path) -> None:
    client = Clients("http://127.0.0.1:9", token_file)()
    with pytest.raises(errors.MonitorUnavailableError, match=r"127\.0\.0\.1:9"):
        client.resume()
