"""Servers of tiny models, each started once."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.vllm.support.server import CALL_SECONDS, START_SECONDS, Server, serve
from tests.vllm.support.storage import Storage, reachable_storage
from tests.vllm.support.tiny_model import PROMPT, Reference, make_dense

SECONDS = int(START_SECONDS + 4 * CALL_SECONDS)

# In bf16, of log-probabilities about -3: vLLM's kernels round at other places than torch's.
TOLERANCE = 0.15
# How far those of another version are off, at the least.
APART = 1.0

Serves = Callable[[Server, Path, dict[str, torch.Tensor] | None], bool]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers take a minute to start, more on a busy machine."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model."""
    return make_dense(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of `model`, which tests leave serving."""
    started = serve(model, tmp_path_factory.mktemp("server"))
    yield started
    started.stop()


@pytest.fixture
def serves(tmp_path: Path) -> Serves:
    """Whether a server generates with these weights of a model (None: those of its folder).

    Asserts that it is one or the other beyond doubt.
    """

    def check(server: Server, model: Path, weights: dict[str, torch.Tensor] | None) -> bool:
        choice = server.complete(PROMPT, 12)
        said = choice["logprobs"]["token_logprobs"]
        scratch = tmp_path / f"reference-{os.urandom(4).hex()}"
        wanted = Reference(model, weights, scratch).logprobs(choice["token_ids"])
        off = max(abs(a - b) for a, b in zip(said, wanted, strict=True))
        assert off < TOLERANCE or off > APART, f"neither these weights nor others: {off}"
        return off < TOLERANCE

    return check


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """An S3 server."""
    with reachable_storage(tmp_path / "s3") as made:
        yield made
