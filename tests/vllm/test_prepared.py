"""A version that a server prepared while it served is the one that it serves then, or none is."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from trainsync.engines.servers.preparing import PreparationOutcome
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.staging.area import StagingArea

from tests.vllm.support.cases import check_cases
from tests.vllm.support.server import CALL_SECONDS, serve
from tests.vllm.support.tiny_model import PROMPT, make_dense, make_experts, version_of

_KINDS = ["dense", "tied", "experts"]


def _make(kind: str, folder: Path) -> Path:
    return make_experts(folder) if kind == "experts" else make_dense(folder, tied=kind == "tied")


@pytest.mark.parametrize("kind", _KINDS)
def test_a_worker_serves_what_it_prepared_or_what_it_had(kind: str, tmp_path: Path) -> None:
    model = _make(kind, tmp_path / "model")
    files = []
    for version in (1, 2, 3):
        file = tmp_path / f"{version}.safetensors"
        save_file(version_of(model, version), file)
        files.append(file)
    script = shutil.copy(Path(__file__).parent / "scripts" / "prepared_versions.py", tmp_path)
    check_cases(script, tmp_path, [model, *files], VLLM_ENABLE_V1_MULTIPROCESSING="0")


def test_what_is_prepared_is_all_that_was_loaded_and_fits(tmp_path: Path) -> None:
    check_cases(Path(__file__).parent / "scripts" / "twin_cases.py", tmp_path)


@pytest.mark.parametrize("kind", ["dense", "experts", "two workers"])
def test_a_server_serves_a_prepared_version_as_one_that_was_started_with_it(
    kind: str, tmp_path: Path
) -> None:
    model = _make(kind, tmp_path / "model")
    newest = tmp_path / "newest"
    shutil.copytree(model, newest)
    weights = version_of(model, 1)
    save_file(weights, newest / "model.safetensors", {"format": "pt"})
    two = kind == "two workers"
    options = ("--tensor-parallel-size", "2") if two else ()
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if two else {}
    said = []
    area = StagingArea()
    for folder in (model, newest):
        server = serve(folder, tmp_path, *options, variables=variables)
        try:
            with VLLMServer(server.url, timeout=CALL_SECONDS) as driver:
                if folder == model:
                    staged = area.stage(1, weights)
                    asked: list[int] = []
                    prepared = driver.prepare(
                        CALL_SECONDS, 1, staged, lambda asked=asked: asked.append(1)
                    )
                    assert prepared.outcome is PreparationOutcome.PREPARED, prepared.reason
                    assert driver.version() is None
                    driver.update(1, staged)
                    count = server.log.read_text().count("version 1 was prepared before the pause")
                    assert count == (2 if two else 1)
                said.append((server.complete(PROMPT, 12)["logprobs"], driver.checksums()))
        finally:
            server.stop()
    area.close()
    assert said[0] == said[1]
