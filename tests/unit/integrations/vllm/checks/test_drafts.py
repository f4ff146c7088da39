"""A server that cannot load a draft model says why."""

from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.integrations.vllm.checks.drafts import unfit_for_drafts


def _config(method: str | None = "draft_model", lora: object = None, stages: int = 1) -> Any:
    return SimpleNamespace(
        speculative_config=None if method is None else SimpleNamespace(method=method),
        lora_config=lora,
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )


def test_a_server_with_a_draft_model_takes_its_tensors() -> None:
    assert unfit_for_drafts(_config()) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(None), "has no draft model: start it with one in --speculative-config"),
        (_config("ngram"), "drafts by ngram, expected draft_model"),
        (_config("eagle3"), "drafts by eagle3, expected draft_model"),
        (_config(lora=object()), "has --enable-lora"),
        (_config(stages=2), "has pipeline stages"),
    ],
)
def test_other_servers_take_none(config: Any, message: str) -> None:
    assert message in (unfit_for_drafts(config) or "")
