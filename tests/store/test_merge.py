"""A step in a bucket becomes a Hugging Face model, on a disk or in a bucket, or nothing at all."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from trainsync.storage.objects import folders
from transformers import Qwen2ForCausalLM

from tests.store.conftest import Place
from tests.store.servers.fault_proxy import Fault
from tests.unit.cli.commands import call, document
from tests.unit.cli.small_models import assert_is, save, small_model

SHARD = r"objects/global_step_5/.*/model_.*\.pt$"
FILES = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return small_model()


@pytest.fixture(scope="module")
def saved(model: Qwen2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def stored(place: Place, saved: Path) -> str:
    """URL of the bucket with the step in it."""
    document("cp", saved, place.url())
    place.proxy.asked.clear()
    return place.url()


def objects_read(place: Place) -> list[str]:
    return [path for method, path in place.proxy.asked if method == "GET" and "/objects/" in path]


def keys_below(place: Place, prefix: str) -> list[str]:
    return [key.removeprefix(prefix) for key in place.objects() if key.startswith(prefix)]


def test_a_step_in_a_bucket_is_merged_and_its_optimizer_is_not_read(
    place: Place, stored: str, tmp_path: Path, model: Qwen2ForCausalLM
) -> None:
    output = tmp_path / "out" / "model"
    found = document("merge", stored, "latest", "-o", output)
    assert (found["directory"], found["step"], found["kind"]) == (stored, 5, "checkpoint")
    assert found["files"] == FILES
    assert_is(output, model)
    read = objects_read(place)
    assert len(read) == 3
    assert not [path for path in read if "optim" in path]
    assert list(output.parent.iterdir()) == [output]


def test_a_damaged_object_is_named_and_nothing_is_left(
    place: Place, stored: str, tmp_path: Path
) -> None:
    (shard,) = place.files.rglob("model_world_size_1_rank_0.pt")
    data = bytearray(shard.read_bytes())
    data[-2000] ^= 1
    shard.write_bytes(data)
    output = tmp_path / "out" / "model"
    result = call("merge", stored, 5, "-o", output)
    assert result.exit_code == 3
    assert "checkpoint 5 was not merged" in result.stderr
    assert f"{shard.name} has digest" in result.stderr
    assert list(output.parent.iterdir()) == []


def test_without_room_the_need_is_told_and_nothing_is_copied(
    place: Place, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_blocks=100, f_bavail=2, f_frsize=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    output = tmp_path / "out" / "model"
    result = call("merge", stored, 5, "-o", output)
    assert result.exit_code == 3
    assert "a copy of the shards (" in result.stderr
    assert "and the merged weights need" in result.stderr
    assert "has 2.0 kB free" in result.stderr
    assert objects_read(place) == []
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "left"), [(Fault.TRUNCATED, 1), (Fault.CORRUPTED, 1), (Fault.REFUSED, 2)]
)
def test_a_store_that_fails_for_a_while_is_asked_again(
    place: Place, stored: str, tmp_path: Path, model: Qwen2ForCausalLM, fault: Fault, left: int
) -> None:
    rule = place.proxy.break_next(fault, "GET", SHARD, left)
    document("merge", stored, 5, "-o", tmp_path / "model")
    assert rule.left == 0
    assert_is(tmp_path / "model", model)


def test_bytes_that_are_always_wrong_are_never_merged(
    place: Place, stored: str, tmp_path: Path
) -> None:
    place.proxy.break_next(Fault.CORRUPTED, "GET", SHARD, 1000)
    result = call("merge", stored, 5, "-o", tmp_path / "model")
    assert result.exit_code == 3
    assert "has digest" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_is_one_sentence(
    place: Place, stored: str, saved: Path, tmp_path: Path
) -> None:
    new = tmp_path / "model"
    for arguments, expected in (
        ((stored, 6, "-o", new), "step 6 is not committed in s3://"),
        ((stored, 5, "-o", new, "--kind", "state_dict"), "state_dict 5 is not committed"),
        ((stored, "x", "-o", new), "expected a number"),
        ((stored, 5, "-o", saved), "not empty: give a new directory"),
        ((stored, 5, "-o", f"{stored}/model"), "is inside the run's store"),
        ((saved, 5, "-o", stored), "is not empty (latest_checkpointed_iteration.txt)"),
        ((stored, 5, "-o", "ftp://a/b"), "no store is opened by ftp://"),
        ((saved, 5, "-o", new, "--endpoint", "https://x"), "are for the URL of a store"),
    ):
        result = call("merge", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.stderr
        assert expected in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("of_bucket", [True, False])
def test_a_model_is_put_into_a_bucket_with_its_configuration_last(
    place: Place,
    stored: str,
    saved: Path,
    model: Qwen2ForCausalLM,
    of_bucket: bool,
) -> None:
    url = place.url("models/a")
    found = document("merge", stored if of_bucket else saved, 5, "-o", url)
    assert found["output"] == url
    assert keys_below(place, "models/a/") == FILES
    assert_is(place.files / "models/a", model)
    puts = [path.rpartition("/")[2] for method, path in place.proxy.asked if method == "PUT"]
    assert sorted(puts[-3:-1]) == FILES[1:]
    assert puts[-1] == "config.json"
    result = call("merge", saved, 5, "-o", url)
    assert result.exit_code == 2
    assert "is not empty (config.json); expected a new prefix" in result.stderr


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.DONE_BUT_500])
def test_a_configuration_that_was_put_and_whose_reply_is_lost_counts(
    place: Place, saved: Path, model: Qwen2ForCausalLM, fault: Fault
) -> None:
    rule = place.proxy.break_next(fault, "PUT", r"config\.json$")
    document("merge", saved, 5, "-o", place.url("m"))
    assert rule.left == 0
    assert keys_below(place, "m/") == FILES
    assert_is(place.files / "m", model)


def test_a_model_that_could_not_be_put_is_taken_back(place: Place, saved: Path) -> None:
    place.proxy.break_next(Fault.REFUSED, "PUT", r"safetensors$", 1000, status=403, code="Denied")
    result = call("merge", saved, 5, "-o", place.url("m"))
    assert result.exit_code == 3
    assert len(result.stderr.splitlines()) == 1
    assert keys_below(place, "m/") == []


def test_what_a_killed_writer_left_is_refused(
    place: Place, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(folders, "for_each", killed)
        patched.setattr(folders, "_remove", lambda *_: None)
        assert call("merge", saved, 5, "-o", place.url("m")).exit_code == 130
    result = call("merge", saved, 5, "-o", place.url("m"))
    assert result.exit_code == 2
    assert "another process writes to s3://" in result.stderr
    assert keys_below(place, "m/") == [folders.MARKER]
