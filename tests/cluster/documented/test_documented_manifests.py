"""The real API server accepts every TrainingRun of the documentation."""

from typing import Any

import pytest
import yaml

from tests.cluster.conftest import Kubectl
from tests.unit.docs.pages import all_blocks

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]

RUNS: dict[str, dict[str, Any]] = {
    block.where: document
    for block in all_blocks("yaml")
    for document in yaml.safe_load_all(block.text)
    if isinstance(document, dict) and document.get("kind") == "TrainingRun"
}


@pytest.mark.parametrize("where", RUNS)
def test_a_documented_trainingrun_is_taken(where: str, module_namespace: Kubectl) -> None:
    done = module_namespace.apply(RUNS[where], "--dry-run=server")
    assert done.returncode == 0, done.stderr


def test_the_pages_show_a_trainingrun() -> None:
    assert RUNS


@pytest.mark.parametrize(
    "words",
    [
        ("get", "trainingruns", "-A"),
        ("get", "trainingruns", "-A", "-o", "wide"),
        ("get", "tr"),
        ("explain", "trainingrun.spec", "--recursive"),
    ],
    ids=" ".join,
)
def test_the_documented_looks_at_runs_work(words: tuple[str, ...], namespace: Kubectl) -> None:
    namespace(*words)
