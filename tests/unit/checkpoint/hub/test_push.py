"""A push is one commit of the whole model, or none; the real client talks to a local hub."""

import os
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils._http import default_client_factory
from trainsync.checkpoint.hub import repository
from trainsync.checkpoint.hub.errors import ModelFilesError, PushError
from trainsync.checkpoint.hub.repository import Repository, Visibility

from tests.unit.checkpoint.hub.conftest import contents
from tests.unit.checkpoint.hub.hub_server import SIGNATURE, TOKEN, Hub

REPO = "me/tiny"
COMMIT = "/commit/"


def refused(hub: Hub, model: Path, why: str, create: Visibility | None = None) -> None:
    """With one sentence that has no secret, and no commit."""
    before = {name: repo.head for name, repo in hub.repos.items()}
    with pytest.raises(PushError, match=why) as caught:
        Repository(REPO, create=create).push(model, "x")
    text = str(caught.value)
    assert "\n" not in text
    assert TOKEN not in text
    assert SIGNATURE not in text
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert {name: repo.head for name, repo in hub.repos.items()} == before


def test_a_model_is_one_commit_with_every_byte(hub: Hub, model: Path) -> None:
    repo = hub.make(REPO)
    pushed = Repository(REPO).push(model, "step 5")
    assert repo.files == contents(model) | {".gitattributes": repo.files[".gitattributes"]}
    assert repo.messages == ["initial commit", "step 5"]
    assert (pushed.commit, pushed.files, pushed.removed) == (repo.head, 5, ())
    assert pushed.url == f"{hub.endpoint}/{REPO}/commit/{repo.head}"
    assert pushed.bytes == sum(map(len, contents(model).values()))


def test_old_weights_go_with_the_same_commit_and_other_files_stay(hub: Hub, model: Path) -> None:
    repo = hub.make(REPO)
    old = {
        "model.safetensors": b"1",
        "model-00003-of-00003.safetensors": b"2",
        "pytorch_model.bin.index.json": b"{}",
        "README.md": b"mine",
        "adapter/model.safetensors": b"3",
        "training_args.bin": b"4",
    }
    repo.add(old, "old")
    pushed = Repository(REPO).push(model, "new")
    assert set(pushed.removed) == {
        "model.safetensors",
        "model-00003-of-00003.safetensors",
        "pytorch_model.bin.index.json",
    }
    kept = {"README.md", "adapter/model.safetensors", "training_args.bin"}
    assert set(repo.files) == kept | set(contents(model))
    assert len(repo.commits) == 3


def test_the_same_model_again_is_no_other_commit(hub: Hub, model: Path) -> None:
    repo = hub.make(REPO)
    first = Repository(REPO).push(model, "x")
    assert Repository(REPO).push(model, "x").commit == first.commit
    assert len(repo.commits) == 2


def test_a_token_that_is_refused_is_one_sentence(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.make(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(hub, model, r"the token is not valid \(401\); set HF_TOKEN")
    assert hub.sent() == []


@pytest.mark.parametrize("pattern", ["/preupload/", "/batch", "/storage/", COMMIT])
def test_a_token_without_the_right_to_write_is_one_sentence(
    hub: Hub, model: Path, pattern: str
) -> None:
    hub.make(REPO)
    hub.fail("PUT" if pattern == "/storage/" else "POST", pattern, 403, left=100)
    refused(hub, model, r"the token may not write there \(403\)")


def test_without_a_token_nothing_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PushError, match="no token; set HF_TOKEN, or log in"):
        Repository(REPO)
    assert hub.asked == []


def test_a_repository_that_is_not_there_is_made_when_that_is_asked_for(
    hub: Hub, model: Path
) -> None:
    refused(hub, model, "no such model repository, or the token may not see it; --create makes")
    assert hub.sent() == []
    Repository(REPO, create=Visibility.PRIVATE).check()
    assert hub.repos == {}
    Repository(REPO, create=Visibility.PRIVATE).push(model, "x")
    assert hub.repos[REPO].private
    Repository("me/open", create=Visibility.PUBLIC).push(model, "x")
    assert not hub.repos["me/open"].private
    Repository(REPO, create=Visibility.PRIVATE).push(model, "x")  # it is there


def test_a_public_repository_is_not_taken_for_a_private_one(hub: Hub, model: Path) -> None:
    hub.make(REPO, private=False)
    refused(hub, model, "is there already, and public", Visibility.PRIVATE)
    assert hub.sent() == []


def test_a_branch_that_is_not_there_is_refused(hub: Hub, model: Path) -> None:
    target = Repository(REPO, revision="dev", create=Visibility.PRIVATE)
    with pytest.raises(PushError, match="a new one has no branch dev"):
        target.push(model, "x")
    hub.make(REPO)
    with pytest.raises(PushError, match="there is no branch dev"):
        target.push(model, "x")
    assert hub.sent() == []


@pytest.mark.parametrize("repo", ["tiny", "a/b/c", "a//b", "../x", "me/x y", "hf_x@y/z", "me/a--b"])
def test_a_wrong_name_is_refused_before_anything_is_asked(hub: Hub, repo: str) -> None:
    with pytest.raises(PushError, match="expected NAMESPACE/NAME"):
        Repository(repo)
    assert hub.asked == []


def test_a_model_that_is_cut_short_is_refused_before_anything_is_asked(
    hub: Hub, model: Path
) -> None:
    hub.make(REPO)
    os.truncate(model / "model-00002-of-00002.safetensors", 300)
    with pytest.raises(ModelFilesError, match="has 300 bytes"):
        Repository(REPO).push(model, "x")
    assert hub.asked == []


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        ("GET", "/api/models/"),
        ("POST", "/preupload/"),
        ("POST", "/batch"),
        ("PUT", "/storage/"),
        ("POST", "/verify"),
        ("POST", COMMIT),
        ("GET", "blobs"),
    ],
)
def test_a_hub_that_fails_for_a_while_is_asked_again(
    hub: Hub, model: Path, method: str, pattern: str, done: bool
) -> None:
    repo = hub.make(REPO)
    rule = hub.fail(method, pattern, 500, left=2 if not done else 1, done=done)
    pushed = Repository(REPO).push(model, "x")
    assert rule.left == 0
    assert pushed.commit == repo.head
    assert len(repo.commits) == 2, "also where the reply was lost, it is one commit"
    assert contents(model).items() <= repo.files.items()


@pytest.mark.parametrize(
    ("method", "pattern", "most"),
    [("GET", "/api/models/", 3), ("PUT", "/storage/", 12), ("POST", COMMIT, 3)],
)
def test_a_hub_that_never_answers_well_is_given_up(
    hub: Hub, model: Path, method: str, pattern: str, most: int
) -> None:
    hub.make(REPO)
    rule = hub.fail(method, pattern, 503, left=1000)
    refused(hub, model, "the hub answered 503, also when it was asked again")
    assert 1000 - rule.left <= most


def test_another_commit_meanwhile_is_built_upon(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.make(REPO)
    create_commit = huggingface_hub.HfApi.create_commit

    def late(*args: object, **options: object) -> object:
        if len(repo.commits) == 1:
            repo.add(repo.files | {"README.md": b"theirs", "model.safetensors": b"old"}, "theirs")
        return create_commit(*args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", late)
    pushed = Repository(REPO).push(model, "mine")
    assert repo.messages == ["initial commit", "theirs", "mine"]
    assert repo.files["README.md"] == b"theirs"
    assert pushed.removed == ("model.safetensors",)


def test_files_that_the_hub_leaves_out_are_missed(hub: Hub, model: Path) -> None:
    repo = hub.make(REPO)
    hub.ignored = {"model-00002-of-00002.safetensors"}
    with pytest.raises(PushError, match=r"was made, but model-00002.* is not in it.*gitignore"):
        Repository(REPO).push(model, "x")
    assert len(repo.commits) == 2


def test_a_hub_that_cannot_be_reached_is_one_sentence(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    refused(hub, model, r"the hub cannot be reached \(ConnectError\)")


def test_offline_a_push_is_refused(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(hub, model, "HF_HUB_OFFLINE is set")
    assert hub.asked == []


def test_a_hub_that_hangs_is_given_up(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.make(REPO)
    monkeypatch.setattr(repository, "_DEADLINES", httpx.Timeout(0.2))
    with hub.lock:
        refused(hub, model, "the hub did not answer in time")


def test_what_was_set_of_huggingface_hub_is_as_before(hub: Hub, model: Path) -> None:
    hub.make(REPO)
    verbosity = huggingface_hub.logging.get_verbosity()
    had = huggingface_hub.utils.are_progress_bars_disabled()
    Repository(REPO).push(model, "x")
    assert huggingface_hub.logging.get_verbosity() == verbosity
    assert huggingface_hub.utils.are_progress_bars_disabled() is had
    assert huggingface_hub.utils._http._GLOBAL_CLIENT_FACTORY is default_client_factory


def test_nothing_is_said_while_uploads_are_tried_again(
    hub: Hub, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.make(REPO)
    hub.fail("PUT", "/storage/", 500, left=2)
    Repository(REPO).push(model, "x")
    assert capfd.readouterr() == ("", "")
