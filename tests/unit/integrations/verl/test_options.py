"""What a configuration of verl says about our backend, checked before anything is sent."""

from typing import Any

import pytest
import torch
from trainsync.integrations.verl.options import SyncOptions

GOOD: dict[str, Any] = {
    "largest_bucket": 2 << 30,
    "bucket_megabytes": 16,
    "timeout_seconds": 60.0,
    "delta": False,
    "same_host": True,
    "rollout_dtype": "bfloat16",
    "host": None,
}


def test_a_message_is_never_larger_than_verl_allows() -> None:
    assert SyncOptions.of(**GOOD).bucket_size == 16 << 20
    assert SyncOptions.of(**{**GOOD, "largest_bucket": 1 << 20}).bucket_size == 1 << 20


def test_the_whole_takes_no_longer_than_the_timeout() -> None:
    assert SyncOptions.of(**GOOD).deadlines.whole == 60.0
    assert SyncOptions.of(**GOOD).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket_megabytes", 0),
        ("timeout_seconds", 0),
        ("timeout_seconds", float("nan")),
        ("rollout_dtype", "int8"),
        ("rollout_dtype", "no_such"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"engine_kwargs\.trainsync\.{name} is .*expected"):
        SyncOptions.of(**{**GOOD, name: value})
