"""The proof of a version, by the trainer's model; all ranks ask it together."""

from trainsync.engines.protocol import TrainingEngine, is_megatron
from trainsync.weights.proof.asking import Prover
from trainsync.weights.proof.record import Proof


def check_prover(prover: Prover | None, engine: TrainingEngine) -> None:
    """Refuse a prover of a model that cannot be asked.

    Raises:
        ValueError: it is a model of Megatron.
    """
    if prover is not None and is_megatron(engine.module):
        raise ValueError("a prover asks torch modules, and this is a model of Megatron")


def proof_of(prover: Prover | None, engine: TrainingEngine, step: int) -> Proof | None:
    """The proof of the weights that the engine has now; None without a prover.

    Raises:
        ProofError: as `Prover.ask`.
    """
    if prover is None:
        return None
    with engine.resident():
        return prover.ask(engine.module, step)
