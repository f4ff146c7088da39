"""Servers of tiny models, each started once."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from trainsync.weights.staging.area import StagingArea

from tests.sglang.server import Server, serve
from tests.vllm.conftest import APART, SECONDS, TOLERANCE
from tests.vllm.support.tiny_model import PROMPT, Reference, make_dense

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
    started.kill()


@pytest.fixture(scope="module")
def area() -> Iterator[StagingArea]:
    made = StagingArea()
    yield made
    made.close()


@pytest.fixture
def serves(tmp_path: Path) -> Serves:
    """Whether a server generates with these weights of a model (None: those of its folder).

    Asserts that it is one or the other beyond doubt.
    """

    def check(server: Server, model: Path, weights: dict[str, torch.Tensor] | None) -> bool:
        said = server.generate(PROMPT, 12)["output_token_logprobs"]
        scratch = tmp_path / f"reference-{os.urandom(4).hex()}"
        wanted = Reference(model, weights, scratch).logprobs([row[1] for row in said])
        off = max(abs(row[0] - b) for row, b in zip(said, wanted, strict=True))
        assert off < TOLERANCE or off > APART, f"neither these weights nor others: {off}"
        return off < TOLERANCE

    return check
