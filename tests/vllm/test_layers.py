"""A worker finds layers that compute with other weights than were staged."""

import itertools
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.corruptions.catalogue import CATALOGUE
from tests.corruptions.real_layers import RealLayers
from tests.corruptions.versions import Kind, Lineage, make_model
from tests.vllm.conftest import SECONDS
from tests.vllm.support.cases import check_cases
from tests.vllm.support.server import environment, vllm_environment
from tests.vllm.support.tiny_model import make_dense, make_experts, version_of

_SMALL_STEP = 3e-5  # canaries cannot tell a mix of two versions that are so near


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_layers_show_every_fault_behind_the_staged_weights_and_no_clean_update(
    kind: Kind, tmp_path: Path
) -> None:
    model = make_model(kind, tmp_path / "model")
    lineage = Lineage(model, pretraining=20)
    states = []
    for _ in range(3):
        lineage.step(_SMALL_STEP)
        states.append(lineage.state())
    layers = RealLayers(vllm_environment() / "bin/python", environment(tmp_path), model)
    try:
        for state in states:
            assert layers.wrong(state, state) == []
        old, new = states[1:]
        rng = random.Random(0)
        for corruption, _ in itertools.product(CATALOGUE, range(3)):
            served = corruption.fault(rng, old, new)
            wrong = layers.wrong(served, served if corruption.staged else new)
            assert bool(wrong) is not corruption.staged, (corruption.name, wrong)
    finally:
        layers.close()


def test_layers_are_refused_only_where_the_layout_is_known(tmp_path: Path) -> None:
    check_cases(Path(__file__).parent / "scripts" / "layer_cases.py", tmp_path)


@pytest.mark.parametrize("kind", ["dense", "experts", "draft"])
def test_a_worker_that_keeps_packed_weights_is_refused_until_it_packs_anew(
    kind: str, tmp_path: Path
) -> None:
    model = (make_experts if kind == "experts" else make_dense)(tmp_path / "model")
    files = []
    for version in (1, 2):
        file = tmp_path / f"{version}.safetensors"
        weights = version_of(model, version)
        draft = {f"draft.{name}": tensor.clone() for name, tensor in weights.items()}
        save_file(weights | draft if kind == "draft" else weights, file)
        files.append(file)
    python = vllm_environment() / "bin/python"
    script = shutil.copy(Path(__file__).parent / "scripts" / "forgetful.py", tmp_path)
    done = subprocess.run(
        [python, script, kind, model, *files],
        env={**environment(tmp_path), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    layer = "experts.routed_experts.w13_weight" if kind == "experts" else "mlp.down_proj.weight"
    assert told[0] == "TOLD 1 loaded"
    assert "2 is refused" in told[1]
    whose = " of the draft model" if kind == "draft" else ""
    assert f"parameters{whose} have other weights than were loaded" in told[1]
    assert f"model.layers.0.mlp.{layer}".replace("mlp.mlp", "mlp") in told[1]
    assert told[2] == "TOLD 2 loaded"
