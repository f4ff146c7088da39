import json
from pathlib import Path

import pytest
from trainsync.cli import app
from trainsync.monitor.core import CoreSettings, MonitorCore
from trainsync.storage import pointers
from trainsync.storage.layout import RunDirectory
from typer.testing import CliRunner, Result

from tests.unit.monitor.saves import CHECKPOINT, FIRST, STATE_DICT, Clock, request, write_all


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    core = MonitorCore(directory, CoreSettings(), clock=Clock())
    core.claim(FIRST, "main", None)
    for step, kind in ((10, CHECKPOINT), (20, STATE_DICT), (20, CHECKPOINT)):
        core.register(FIRST, request(step, kind))
        write_all(tmp_path, FIRST, step, kind)
    core.tick()
    return directory


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])


def test_ls_shows_every_committed_save_and_which_is_the_latest(run: RunDirectory) -> None:
    assert call("ls", run.root).exit_code == 0
    result = call("ls", run.root, "--json")
    assert result.exit_code == 0
    saves = json.loads(result.stdout)["saves"]
    assert [(s["step"], s["kind"], s["pointedAt"], s["files"]) for s in saves] == [
        (10, "checkpoint", False, 2),
        (20, "checkpoint", True, 2),
        (20, "state_dict", True, 2),
    ]


def test_verify_reads_the_bytes_and_ls_only_sizes(run: RunDirectory) -> None:
    assert call("verify", run.root).exit_code == 0
    file = run.step(20) / "actor/checkpoint_rank_0.pt"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    assert call("ls", run.root).exit_code == 0
    result = call("verify", run.root)
    assert result.exit_code == 1
    assert "has digest" in result.stdout
    assert call("verify", run.root, "--step", "10").exit_code == 0
    result = call("verify", run.root, "--step", "20", "--json")
    assert result.exit_code == 1
    problems = {s["kind"]: s["problem"] for s in json.loads(result.stdout)["saves"]}
    assert problems["state_dict"] is None
    assert "checkpoint_rank_0.pt" in problems["checkpoint"]


def test_a_missing_file_or_torn_manifest_is_damage(run: RunDirectory) -> None:
    (run.step(10) / "actor/checkpoint_rank_1.pt").unlink()
    run.manifest(STATE_DICT, 20).write_bytes(b"{")
    result = call("ls", run.root)
    assert result.exit_code == 1
    assert "checkpoint_rank_1.pt is missing" in result.stdout
    assert "MANIFEST.state_dict.json" in result.stdout


def test_a_pointer_to_nothing_is_said(run: RunDirectory) -> None:
    pointers.move_pointer(run, CHECKPOINT, 99)
    result = call("ls", run.root)
    assert result.exit_code == 1
    assert "names step 99, which has no manifest" in result.stdout


def test_an_empty_directory_is_fine_and_a_wrong_one_is_wrong_usage(tmp_path: Path) -> None:
    result = call("ls", tmp_path)
    assert result.exit_code == 0
    assert "nothing is committed" in result.stdout
    assert call("ls", tmp_path / "none").exit_code == 2
    assert call("verify", tmp_path, "--step", "5").exit_code == 2
