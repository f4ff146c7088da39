"""The last lines of a container, bounded and without secrets."""

from typing import Any

import pytest
from trainsync_operator.reconcile import last_words
from trainsync_operator.reconcile.last_words import LENGTH, LINES


def pod(**env: str) -> dict[str, Any]:
    entries = [{"name": name, "value": value} for name, value in env.items()]
    from_secret = {"name": "OTHER_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    return {"spec": {"containers": [{"name": "ray", "env": [*entries, from_secret]}]}}


POD = pod(HF_TOKEN="hf_abcdef", DB_PASSWORD="pass word\nline2", KEY="k", MODEL="qwen3", AUTH_ON="1")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("a\n  b\t c\n\n", "a | b c"),
        ("login with hf_abcdef: refused", "login with ***: refused"),
        ("it was pass word", "it was ***"),
        ("then line2!", "then ***!"),
        ("model qwen3 is k, 1", "model qwen3 is k, 1"),
        ("WANDB_API_KEY=0123 in force", "WANDB_API_KEY=*** in force"),
        ('{"access_key": "AKIA1", "step": 3}', '{"access_key": ***, "step": 3}'),
        ("Authorization: Bearer ey.x.y", "Authorization: ***"),
        ("pip from https://me:pw@host/x", "pip from https://***@host/x"),
        ("", None),
        (None, None),
    ],
)
def test_what_is_told(message: str | None, said: str | None) -> None:
    assert last_words.of({"message": message}, POD) == said


def test_lines_and_characters_are_bounded_and_the_last_ones_stay() -> None:
    many = "\n".join(str(n) for n in range(100))
    assert last_words.of({"message": many}, POD) == " | ".join(str(n) for n in range(100)[-LINES:])
    long = last_words.of({"message": "x" * 3000 + "end"}, POD)
    assert long is not None
    assert (len(long), long[0], long[-3:]) == (LENGTH, "…", "end")


def test_a_secret_that_the_kubelet_cut_in_two_is_left_out() -> None:
    message = "bcdef\n" + "\n".join(f"{'y' * 100} {n}" for n in range(20))
    said = last_words.of({"message": message}, POD)
    assert said is not None
    assert "bcdef" not in said


def test_masking_takes_no_time_to_speak_of() -> None:
    for text in (
        "token" * 400,
        "a" * 2048,
        "token= " * 300,
        "://" + "a" * 2000,
        "token" + " " * 2000,
    ):
        last_words.of({"message": text}, POD)
