"""Any text arrives in the API server, which reads an apply as YAML."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from trainsync.kube.apply_body import apply_body
from trainsync.kube.client import connect

EMOJI = "GLHF! \U0001f3d6\ufe0f"  # the end of gloo's message about a lost connection


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.none()), min_size=1))
def test_any_text_is_the_same_when_it_is_read_as_yaml_and_as_json(obj: dict[str, object]) -> None:
    body = apply_body(obj)
    assert yaml.safe_load(body) == json.loads(body) == obj


def test_half_of_a_character_becomes_the_replacement_character() -> None:
    assert json.loads(apply_body({"a": "x\ud83cy"})) == {"a": "x\ufffdy"}


async def test_the_client_sends_an_apply_as_that_text_and_other_bodies_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainsync.kube.client.config.load_incluster_config", lambda **_: None)
    async with await connect() as client:
        sent = []

        async def request(
            method: str, url: str, *, headers: dict[str, str], body: object, **_: object
        ) -> None:
            sent.append((headers["Content-Type"], body))

        monkeypatch.setattr(client.rest_client, "request", request)
        for kind in ("application/apply-patch+yaml", "application/json"):
            await client.call_api("PATCH", "http://x", {"Content-Type": kind}, {"m": EMOJI})
    assert sent == [
        ("application/apply-patch+yaml; charset=utf-8", f'{{"m": "{EMOJI}"}}'),
        ("application/json", {"m": EMOJI}),
    ]
