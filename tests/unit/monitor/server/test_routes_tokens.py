"""Authorization of the real service on a real socket."""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from trainsync.monitor import errors

from tests.unit.monitor.asking import metrics, sent
from tests.unit.monitor.fakes import UID, FakeApi, RunningMonitor, Signer
from tests.waiting import eventually


def unsigned(signer: Signer) -> str:
    claims = jwt.decode(signer.token(), options={"verify_signature": False})
    return jwt.encode(claims, "", "none", headers={"kid": signer.key_id})


def signed_with_the_public_key(signer: Signer) -> str:
    public = signer.private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    claims = jwt.decode(signer.token(), options={"verify_signature": False})

    def encode(part: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()

    body = f"{encode({'alg': 'HS256', 'kid': signer.key_id, 'typ': 'JWT'})}.{encode(claims)}"
    mac = hmac.new(public, body.encode(), hashlib.sha256).digest()
    return f"{body}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


@pytest.fixture(scope="module")
def at_attempt_2(
    signer: Signer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningMonitor]:
    """One for all tokens: a monitor looks at its run once a second."""
    api = FakeApi(signer)
    api.set_status(attempt=2, generation=2)
    running = RunningMonitor(api, tmp_path_factory.mktemp("volume") / "run")
    eventually(lambda: sent(running, signer.token(generation=2)).json().get("code") == "fenced")
    yield running
    running.stop()


OTHER_NAMESPACE = {"kubernetes.io": {"namespace": "elsewhere", "pod": {"name": "x"}}}


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"uid": "another-uid"}, "forbidden", "of another run"),
        ({"aud": ["https://kubernetes.default.svc"]}, "forbidden", "not a TrainingRun"),
        ({"aud": f"trainsync.dev/run/{UID}/0/x"}, "forbidden", "not a TrainingRun"),
        ({"aud": None}, "unauthenticated", "aud"),
        ({"generation": 1}, "forbidden", "attempt 1, which is replaced"),
        ({"generation": 7}, "not_yet", "No RayCluster of attempt 7"),
        (OTHER_NAMESPACE, "forbidden", "not of namespace"),
        ({"kubernetes.io": None}, "forbidden", "not of namespace"),
        ({"exp": 1}, "unauthenticated", "expired"),
        ({"exp": None}, "unauthenticated", "exp"),
        ({"nbf": 2**33}, "unauthenticated", "not yet valid"),
        ({"iss": "https://evil"}, "unauthenticated", "issuer"),
    ],
)
def test_a_token_that_is_not_of_this_run_namespace_and_generation_is_refused(
    at_attempt_2: RunningMonitor, signer: Signer, changes: dict[str, Any], code: str, said: str
) -> None:
    answer = sent(at_attempt_2, signer.token(**{"generation": 2, **changes}))
    body = answer.json()
    assert body["code"] == code
    assert said.lower() in body["message"].lower()
    assert answer.status_code == errors.BY_CODE[code].status


def test_a_request_without_a_valid_signature_is_refused(
    monitor: RunningMonitor, signer: Signer
) -> None:
    stranger = Signer()
    unknown = Signer("key-9")
    tokens = [
        None,
        "nonsense",
        "a.b.c",
        stranger.token(),
        unknown.token(),
        unsigned(signer),
        signed_with_the_public_key(signer),
        signer.token()[:-4] + "AAAA",
        "x" * 20000,
    ]
    for token in tokens:
        answer = sent(monitor, token)
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated"), token
    refused = metrics(monitor.url)["trainsync_auth_refused_total", (("reason", "unauthenticated"),)]
    assert refused == len(tokens)


def test_unknown_keys_do_not_make_the_monitor_ask_the_api_server_each_time(
    monitor: RunningMonitor, api: FakeApi
) -> None:
    unknown = Signer("key-9").token()
    for _ in range(20):
        sent(monitor, unknown)
    assert api.key_fetches <= 2
