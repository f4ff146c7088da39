"""``PROOF.json``: what a trainer's model says of the canaries; a file of the version's save."""

import math
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass

from trainsync.storage.errors import DamagedFileError, FileCheckError
from trainsync.storage.records import RECORD_CONFIG, decode, encode, read_regular
from trainsync.storage.saves.manifest import Manifest, check_file
from trainsync.weights.proof.canaries import Prompts, check_canaries
from trainsync.weights.proof.errors import ProofError

PROOF_NAME: Final = "PROOF.json"

Count = Annotated[int, Field(ge=0)]
LogProb = Annotated[float, Field(le=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=RECORD_CONFIG)
class Tolerance:
    """How far a server with the right weights may be off, in nats; measured, see
    `trainsync.weights.proof.tolerance`.

    Attributes:
        typical: median size of the tokens' differences.
        rms: root mean square of the differences.
        largest: difference of a single token.
        trainer_rms: root mean square of what the trainer's own rounding adds to the difference of
            two versions; 0: it computes in float32.
    """

    typical: Positive
    rms: Positive
    largest: Positive
    trainer_rms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


@dataclass(frozen=True, config=RECORD_CONFIG)
class Proof:
    """A version's proof.

    Attributes:
        weight_version: the trainer's global step.
        model_dtype: of the model's parameters as the trainer computes, such as ``bfloat16``.
        canaries: token ids of each prompt.
        logprobs: natural logarithms, for each canary of its tokens from the second on, each given
            those before it.
        tolerance: of servers of this version.
    """

    weight_version: Count
    model_dtype: str
    canaries: tuple[tuple[Count, ...], ...]
    logprobs: tuple[tuple[LogProb, ...], ...]
    tolerance: Tolerance
    version: Literal[1] = 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        try:
            check_canaries(self.canaries)
        except ProofError as error:
            raise ValueError(str(error)) from error
        if [len(prompt) - 1 for prompt in self.canaries] != [len(row) for row in self.logprobs]:
            raise ValueError("expected a log-probability for each token of a canary but the first")
        return self


_PROOF: Final = TypeAdapter(Proof)


def make_proof(
    weight_version: int,
    model_dtype: str,
    canaries: Prompts,
    logprobs: tuple[tuple[float, ...], ...],
    tolerance: Tolerance,
) -> Proof:
    """A `Proof` of checked parts.

    Raises:
        ProofError: a log-probability is not finite, or positive: the model is broken.
    """
    for number, row in enumerate(logprobs):
        for value in row:
            if not math.isfinite(value) or value > 0:
                raise ProofError(f"the model gives canary {number} the log-probability {value}")
    return Proof(weight_version, model_dtype, canaries, logprobs, tolerance)


def encode_proof(proof: Proof) -> bytes:
    """The bytes of `PROOF_NAME`: an attachment of a save."""
    return encode(_PROOF, proof)


def decode_proof(data: bytes, path: Path) -> Proof:
    """The proof in ``data``; ``path`` is for messages.

    Raises:
        DamagedFileError: it is none, or of a later release.
    """
    return decode(_PROOF, data, path)


def read_proof(directory: Path, manifest: Manifest) -> Proof | None:
    """The proof of a committed step; None: it was saved without. Hold a lease meanwhile.

    Args:
        directory: of the step.

    Raises:
        DamagedFileError: it is not what the manifest lists, cannot be understood, or is of another
            version than the step; or there are several.
        OSError: it cannot be read.
    """
    found = [entry for entry in manifest.files if Path(entry.path).name == PROOF_NAME]
    if not found:
        return None
    path = directory / found[0].path
    if len(found) > 1:
        raise DamagedFileError(path, f"is one of {len(found)} proofs, expected one")
    try:
        check_file(directory, found[0], with_digest=True)
    except FileCheckError as error:
        raise DamagedFileError(path, str(error)) from error
    proof = decode_proof(read_regular(path), path)
    if proof.weight_version != manifest.step:
        raise DamagedFileError(
            path, f"is of version {proof.weight_version}, expected {manifest.step}"
        )
    return proof
