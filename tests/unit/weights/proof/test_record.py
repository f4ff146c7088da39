"""A proof travels with its version; saves without one load as before."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.storage.digest import file_digest
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry, Participant
from trainsync.weights.proof.canaries import check_canaries, make_canaries
from trainsync.weights.proof.errors import ProofError
from trainsync.weights.proof.record import (
    PROOF_NAME,
    Proof,
    Tolerance,
    decode_proof,
    encode_proof,
    make_proof,
    read_proof,
)

_LIMITS = Tolerance(0.1, 0.2, 0.3)
_PROOF = Proof(7, "bfloat16", ((1, 2, 3), (4, 5)), ((-1.5, -0.25), (-3.0,)), _LIMITS)


def _manifest(step: Path, names: list[str], number: int = 7) -> Manifest:
    entries = tuple(
        FileEntry(name, (step / name).stat().st_size, file_digest(step / name)) for name in names
    )
    return Manifest(
        kind=SaveKind.STATE_DICT,
        step=number,
        attempt=0,
        incarnation="abcdefgh",
        run_uid="uid",
        created_at=datetime.now(UTC),
        participants=(Participant("model", 0),),
        files=entries,
    )


@pytest.fixture
def step(tmp_path: Path) -> Path:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"weights")
    (tmp_path / "actor" / PROOF_NAME).write_bytes(encode_proof(_PROOF))
    return tmp_path


_NAMES = ["actor/model_world_size_1_rank_0.pt", f"actor/{PROOF_NAME}"]


def test_a_proof_is_read_as_it_was_saved_and_its_keys_are_camel_case(step: Path) -> None:
    assert read_proof(step, _manifest(step, _NAMES)) == _PROOF
    raw = json.loads(encode_proof(_PROOF))
    assert set(raw) == {
        "weightVersion", "modelDtype", "canaries", "logprobs", "tolerance", "version"
    }  # fmt: skip
    assert raw["tolerance"]["trainerRms"] == 0


def test_a_save_without_a_proof_has_none(step: Path) -> None:
    assert read_proof(step, _manifest(step, _NAMES[:1])) is None


def test_a_proof_that_changed_or_is_of_another_step_is_refused(step: Path) -> None:
    manifest = _manifest(step, _NAMES)
    with pytest.raises(DamagedFileError, match="is of version 7, expected 8"):
        read_proof(step, replace(manifest, step=8))
    path = step / _NAMES[1]
    path.write_bytes(path.read_bytes().replace(b"-1.5", b"-1.6"))
    with pytest.raises(DamagedFileError, match="has digest"):
        read_proof(step, manifest)
    path.unlink()
    with pytest.raises(DamagedFileError, match="is missing"):
        read_proof(step, manifest)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"logprobs": [[-1.5, -0.25]]},
        {"logprobs": [[-1.5, 0.25], [-3]]},
        {"logprobs": [[-1.5, None], [-3]]},
        {"canaries": []},
        {"tolerance": {"typical": 0, "rms": 1, "largest": 1}},
        {"tolerance": None},
    ],
)
def test_what_is_no_proof_is_refused(change: dict[str, object]) -> None:
    raw = json.loads(encode_proof(_PROOF)) | change
    with pytest.raises(DamagedFileError):
        decode_proof(json.dumps(raw).encode(), Path(PROOF_NAME))


def test_fields_of_a_later_release_are_passed_over() -> None:
    raw = json.loads(encode_proof(_PROOF)) | {"later": 1}
    assert decode_proof(json.dumps(raw).encode(), Path(PROOF_NAME)) == _PROOF


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.1])
def test_a_broken_model_gives_no_proof(value: float) -> None:
    with pytest.raises(ProofError, match="canary 1 the log-probability"):
        make_proof(1, "float32", ((1, 2), (3, 4)), ((-1.0,), (value,)), _LIMITS)


def test_canaries_are_repeatable_and_leave_out_what_is_to_be_avoided() -> None:
    prompts = make_canaries(50, count=20, length=9, seed=3, avoid=range(10))
    assert prompts == make_canaries(50, count=20, length=9, seed=3, avoid=range(10))
    assert prompts != make_canaries(50, count=20, length=9, seed=4, avoid=range(10))
    assert {token for prompt in prompts for token in prompt} <= set(range(10, 50))


@pytest.mark.parametrize("prompts", [[], [[1]], [[1, -1]], [[1, 9]], [[1] * 70_000]])
def test_bad_canaries_are_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ProofError):
        check_canaries(prompts, 9)


def test_no_token_left_for_canaries_is_refused() -> None:
    with pytest.raises(ProofError, match="no token id below 3"):
        make_canaries(3, avoid=(0, 1, 2))
