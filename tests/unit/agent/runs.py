"""A local run that commits, by the code of trainers."""

import secrets
from pathlib import Path

import torch
from trainsync.api.protocol import ParticipantRef, SaveKind, SaveRequest, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.storage.saves.claims import LOCAL_UID
from trainsync.storage.saves.incarnations import successor
from trainsync.weights.proof.record import PROOF_NAME, Proof, encode_proof

Weights = dict[str, torch.Tensor]

_SECONDS = 60


def weights_of(number: int) -> Weights:
    """Other weights for each number."""
    return {
        "model.a": torch.full((64, 8), float(number), dtype=torch.bfloat16),
        "model.b": torch.full((100,), number + 0.5),
    }


class Run:
    """A run whose attempts follow one another.

    Args:
        attempts: that other processes had before.
    """

    def __init__(self, directory: Path, run_uid: str = LOCAL_UID, attempts: int = 0) -> None:
        self.directory = directory
        self._settings = CoreSettings(run_uid=run_uid)
        self._attempt = attempts - 1
        self._monitor: LocalMonitorClient | HttpMonitorClient | None = None

    def start(self) -> int | None:
        """Begin the next attempt; the step that it resumes from."""
        self.stop()
        self._attempt += 1
        self._monitor = monitor = self._client()
        monitor.claim("main")
        point = monitor.resume()
        self._coordinator = CheckpointCoordinator(monitor, self.directory)
        return None if point is None else point.step

    def restart_in_place(self) -> int | None:
        """Go on in the same attempt with a successor; the step that it resumes from."""
        before = self._monitor
        assert before is not None
        self._monitor = monitor = before.renew(successor(before.incarnation), "a rank died")
        point = monitor.resume()
        self._coordinator = CheckpointCoordinator(monitor, self.directory)
        return None if point is None else point.step

    def commit(self, step: int, weights: Weights | None = None, proof: Proof | None = None) -> None:
        """Commit a version."""
        self._save(SaveKind.STATE_DICT, step, weights, proof)

    def checkpoint(self, step: int, weights: Weights | None = None) -> None:
        """Commit a checkpoint to resume from."""
        self._save(SaveKind.CHECKPOINT, step, weights)

    def stop(self) -> None:
        """End the attempt."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _client(self) -> LocalMonitorClient | HttpMonitorClient:
        return LocalMonitorClient(
            self.directory,
            attempt=self._attempt,
            incarnation=secrets.token_hex(8),
            settings=self._settings,
            tick_seconds=0.02,
        )

    def _save(
        self, kind: SaveKind, step: int, weights: Weights | None, proof: Proof | None = None
    ) -> None:
        assert self._monitor is not None
        who = [ParticipantRef(component="model", rank=0)]
        self._monitor.register(SaveRequest(kind=kind, step=step, participants=who))
        self._coordinator.save_sync(
            "model",
            dict(weights_of(step) if weights is None else weights),
            step,
            is_state_dict=kind is SaveKind.STATE_DICT,
            attachments=None if proof is None else {PROOF_NAME: encode_proof(proof)},
        )
        assert self._monitor.save_status(kind, step, _SECONDS).state is SaveState.COMMITTED


class RemoteRun(Run):
    """A run whose monitor is another process, or thread.

    Attributes:
        url: of the monitor, for the attempts that begin from now on.
    """

    def __init__(self, directory: Path, url: str, token_file: Path) -> None:
        super().__init__(directory)
        self.url = url
        self._token_file = token_file

    def _client(self) -> HttpMonitorClient:
        return HttpMonitorClient(
            self.url,
            attempt=self._attempt,
            incarnation=secrets.token_hex(8),
            token_file=self._token_file,
        )
