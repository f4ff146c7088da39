"""Models and steps are pushed by the command to a local hub."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from transformers import Qwen2ForCausalLM

from tests.unit.checkpoint.hub.hub_server import TOKEN, Hub, local_hub
from tests.unit.cli.commands import call, document
from tests.unit.cli.small_models import STEP, assert_is, save, small_model

REPO = "me/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with local_hub(monkeypatch, tmp_path) as found:
        found.make(REPO)
        yield found


@pytest.fixture(autouse=True)
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """TMPDIR."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return small_model()


@pytest.fixture(scope="module")
def saved(model: Qwen2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def merged(saved: Path, tmp_path: Path) -> Path:
    document("merge", saved, STEP, "-o", tmp_path / "merged")
    return tmp_path / "merged"


def download(hub: Hub, folder: Path, repo: str = REPO) -> Path:
    for name, data in hub.repos[repo].files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_merged_model_is_pushed_and_loads(
    hub: Hub, merged: Path, tmp_path: Path, model: Qwen2ForCausalLM
) -> None:
    found = document("push", merged, REPO)
    head = hub.repos[REPO].head
    assert (found["source"], found["repo"], found["revision"]) == (str(merged), REPO, "main")
    assert (found["commit"], found["files"], found["removed"]) == (head, 3, [])
    assert found["url"] == f"{hub.endpoint}/{REPO}/commit/{head}"
    assert_is(download(hub, tmp_path / "down"), model)
    result = call("push", merged, REPO, "--commit-message", "again")
    assert result.exit_code == 0
    assert f"3 files, {found['bytes'] / 1000:.1f} kB, are now in {found['url']}" in result.stdout


def test_a_step_is_merged_and_pushed_and_nothing_is_left_here(
    hub: Hub, saved: Path, tmp_path: Path, work: Path, model: Qwen2ForCausalLM
) -> None:
    document("push", saved, "me/new", "--step", "latest", "--create", "private")
    assert hub.repos["me/new"].private
    assert hub.repos["me/new"].messages[-1] == f"Upload checkpoint {STEP}"
    assert_is(download(hub, tmp_path / "down", "me/new"), model)
    half = document("push", saved, REPO, "--step", STEP, "--dtype", "bfloat16")
    assert half["bytes"] < 0.7 * sum(map(len, hub.repos["me/new"].files.values()))
    assert list(work.iterdir()) == []


def test_a_model_that_is_cut_short_is_refused_before_anything_is_asked(
    hub: Hub, merged: Path
) -> None:
    os.truncate(merged / "model.safetensors", 5000)
    result = call("push", merged, REPO)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("the push failed: ")
    assert "model.safetensors has 5000 bytes, and its header speaks of" in result.stderr
    assert hub.asked == []


def test_what_the_hub_refuses_is_said_before_a_step_is_merged(
    hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainsync.cli.checkpoints.push.merge_step", None)
    result = call("push", saved, "me/none", "--step", STEP)
    assert result.exit_code == 3
    assert "there is no such model repository" in result.stderr
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    result = call("push", saved, REPO, "--step", STEP)
    assert result.exit_code == 3
    assert "the token is not valid (401)" in result.stderr
    assert "hf_wrong" not in result.output
    assert hub.sent() == []


def test_a_damaged_step_is_not_pushed(hub: Hub, tmp_path: Path, model: Qwen2ForCausalLM) -> None:
    directory = save(model, tmp_path / "run")
    (shard,) = (directory / "global_step_5/actor").glob("model_*.pt")
    os.truncate(shard, 100)
    result = call("push", directory, REPO, "--step", STEP)
    assert result.exit_code == 3
    assert "checkpoint 5 was not merged" in result.stderr
    assert hub.sent() == []


def test_wrong_usage_is_one_sentence_and_asks_nothing(hub: Hub, merged: Path, saved: Path) -> None:
    for arguments, code, expected in (
        ((saved, REPO), 2, "is the directory of a run: give --step"),
        ((merged / "none", REPO), 2, "is not a directory"),
        (("s3://bucket/a", REPO), 2, "is a store: give --step"),
        ((merged, REPO, "--dtype", "bfloat16"), 2, "are for a merge: give --step too"),
        ((merged, REPO, "--kind", "checkpoint"), 2, "are for a merge: give --step too"),
        ((merged, REPO, "--endpoint", "https://x"), 2, "are for the URL of a store"),
        ((merged, REPO, "--commit-message", " "), 2, "--commit-message is empty"),
        ((saved, REPO, "--step", 6), 2, "step 6 is not committed"),
        ((saved, REPO, "--step", "x"), 2, "expected a number"),
        ((merged, "tiny"), 3, "'tiny' names no repository; expected NAMESPACE/NAME"),
        ((merged.parent, REPO), 3, "has no config.json; expected what"),
    ):
        result = call("push", *arguments)
        assert (result.exit_code, result.stdout) == (code, ""), result.stderr
        assert expected in result.stderr
    assert hub.asked == []


def test_without_huggingface_hub_it_says_how_to_install_it(
    merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(_name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'huggingface_hub'", name="huggingface_hub")

    monkeypatch.setattr(importlib, "import_module", import_module)
    result = call("push", merged, REPO)
    assert result.exit_code == 3
    assert "push needs huggingface_hub" in result.stderr
    assert "pip install '.[hub]'" in result.stderr


def test_a_process_of_its_own_takes_hub_and_token_from_the_environment(
    hub: Hub, merged: Path, tmp_path: Path
) -> None:
    hub.fail("PUT", "/storage/", 500)
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-c", "from trainsync.cli import main; main()"]
    done = subprocess.run(
        [*command, "checkpoints", "push", str(merged), REPO, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["commit"] == hub.repos[REPO].head
