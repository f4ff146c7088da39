"""The ledger: which saves are open, complete, committed or aborted. Pure: no clock, no I/O.

What was seen goes in through methods (`grant`, `register`, `receive`, `fail`, `verified`,
`committed`, `aborted`), in any order and any number of times; what follows from it comes out of
`decisions`, which the core carries out. The same facts give the same decisions in any order,
so a ledger rebuilt from disk goes on where the lost one stopped.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from trainsync.api.protocol import SaveKind, SaveState, is_skip
from trainsync.monitor.ledger.decisions import Decision, decide
from trainsync.monitor.ledger.saves import (
    AbortCause,
    AbortReason,
    CommittedInfo,
    Save,
    SaveKey,
    SaveOwner,
    key_of,
)
from trainsync.storage.saves.receipts import Participant, Receipt, SaveRegistration


class DifferentParticipantsError(ValueError):
    """A save is registered again with other participants, or by another incarnation."""


class Ledger:
    """See the module's docstring.

    Args:
        save_deadline: a save that lacks a receipt so long after its registration, or is not
            registered so long after its first receipt was seen, is aborted.
    """

    def __init__(self, save_deadline: timedelta) -> None:
        self.save_deadline: Final = save_deadline
        self._attempt: int | None = None
        self._incarnations: dict[str, str] = {}
        self._saves: dict[SaveKey, Save] = {}
        self._committed: dict[SaveKind, dict[int, CommittedInfo]] = {k: {} for k in SaveKind}

    def copy_empty(self) -> "Ledger":
        """A new ledger with the same settings."""
        return Ledger(self.save_deadline)

    # What is in force.

    @property
    def attempt(self) -> int | None:
        """The newest granted attempt."""
        return self._attempt

    @property
    def owners(self) -> frozenset[SaveOwner]:
        """The incarnations in force, one for each cluster that claimed."""
        if self._attempt is None:
            return frozenset()
        return frozenset(SaveOwner(self._attempt, i) for i in self._incarnations.values())

    @property
    def restarts(self) -> int:
        """How often the attempt in force was restarted in place."""
        return max((owner.restarts for owner in self.owners), default=0)

    def cluster_of(self, owner: SaveOwner) -> str | None:
        """The cluster that this owner, which is in force, claimed for; None: it is not."""
        if owner.attempt != self._attempt:
            return None
        found = [name for name, other in self._incarnations.items() if other == owner.incarnation]
        return found[0] if found else None

    def grant(self, cluster: str, owner: SaveOwner) -> None:
        """A claim is granted; saves of older attempts that are still open are superseded.

        So are those of the incarnation that this one succeeds on the cluster. A claim older than
        the one in force changes nothing.
        """
        if self._attempt is not None and owner.attempt < self._attempt:
            return
        if owner.attempt != self._attempt:
            self._attempt = owner.attempt
            self._incarnations = {}
            self._saves = {}
        self._incarnations[cluster] = owner.incarnation
        in_force = self.owners
        self._saves = {key: save for key, save in self._saves.items() if key.owner in in_force}

    # What was seen.

    def register(self, registration: SaveRegistration) -> Save:
        """The full set of participants is known. Saves that ended stay as they are.

        Raises:
            DifferentParticipantsError: it contradicts an earlier registration.
        """
        key = key_of(registration)
        save = self._save(key)
        for other in self._saves.values():
            same = (other.key.kind, other.key.step) == (key.kind, key.step)
            if same and other.key != key and other.registration is not None:
                raise DifferentParticipantsError(
                    f"{key} is registered by another incarnation of the same attempt"
                )
        if save.registration is None:
            save.expect(registration)
            if save.open:
                save.state = SaveState.REGISTERED
        elif (
            set(save.registration.participants) != set(registration.participants)
            or save.registration.reuse_state_dict != registration.reuse_state_dict
        ):
            raise DifferentParticipantsError(f"{key} is registered with other participants")
        return save

    def receive(self, receipt: Receipt) -> None:
        """A receipt is on disk; a changed one has to be verified again."""
        if not self._in_force(key_of(receipt)):
            return
        save = self._save(key_of(receipt))
        before = save.receipts.get(receipt.participant)
        if not save.open or before == receipt or not save.counts(receipt):
            return
        if before is not None and before.writer not in (receipt.writer, *receipt.replaces):
            # Also where its writers could not see each other: whose bytes they are is not known.
            self.fail(
                save.key,
                AbortReason.CONFLICT,
                f"{receipt.participant} was written by two processes that live (writers "
                f"{before.writer} and {receipt.writer}): give each process its own rank",
            )
        save.take(receipt)

    def withdrawn(self, key: SaveKey, participant: Participant) -> None:
        """The participant's receipt is gone: it is written again."""
        save = self._saves.get(key)
        if save is not None and save.open and participant in save.receipts:
            save.drop(participant)

    def fail(self, key: SaveKey, reason: AbortReason, message: str) -> None:
        """The save cannot be completed."""
        if not self._in_force(key):
            return
        save = self._save(key)
        cause = AbortCause(reason, message)
        if save.open and cause not in save.causes:
            save.causes.append(cause)

    def checking(self, key: SaveKey, receipt: Receipt) -> None:
        """Its files are being compared: do not ask for it again."""
        save = self._saves.get(key)
        if save is not None and save.unverified.get(receipt.participant) is receipt:
            save.checking[receipt.participant] = save.unverified.pop(receipt.participant)

    def verified(self, key: SaveKey, receipt: Receipt) -> None:
        """The files of this very receipt are as it says."""
        save, participant = self._saves.get(key), receipt.participant
        if save is not None and save.receipts.get(participant) == receipt:
            save.unverified.pop(participant, None)
            save.checking.pop(participant, None)

    def unchecked(self, key: SaveKey, receipt: Receipt) -> None:
        """Its files could not be compared; ask again."""
        save, participant = self._saves.get(key), receipt.participant
        if save is not None and save.checking.get(participant) == receipt:
            save.unverified[participant] = save.checking.pop(participant)

    def committed(self, kind: SaveKind, info: CommittedInfo) -> None:
        """A manifest is durable."""
        self._committed[kind][info.step] = info
        key = SaveKey(info.owner, info.step, kind)
        if info.owner in self.owners:
            save = self._save(key)
            save.state = SaveState.COMMITTED
            save.error, save.manifest_digest = None, info.digest
            save.forget_details()

    def ended_committed(self, key: SaveKey, manifest_digest: str) -> None:
        """The save was committed once; its step may be gone by retention."""
        save = self._save(key)
        save.state, save.manifest_digest = SaveState.COMMITTED, manifest_digest
        save.forget_details()

    def aborted(self, key: SaveKey, error: str) -> None:
        """The save is aborted, for ever; a committed one stays committed."""
        save = self._save(key)
        if save.open:
            save.state, save.error = SaveState.ABORTED, error
            save.forget_details()

    def late(self, key: SaveKey, participant: Participant) -> bool:
        """Note a part that came after its save's end; True once, if the commit lacks the part."""
        save = self._saves.get(key)
        if save is None or save.state is not SaveState.COMMITTED or save.registration is None:
            return False
        if participant in save.registration.participants or participant in save.late:
            return False
        save.late.add(participant)
        return True

    def uncommitted(self, kind: SaveKind, step: int) -> None:
        """The manifest is gone (retention) or invalid."""
        self._committed[kind].pop(step, None)

    def forget(self, keys: Iterable[SaveKey]) -> None:
        """Drop saves that ended; unknown and open ones are passed over."""
        for key in keys:
            if key in self._saves and not self._saves[key].open:
                del self._saves[key]

    # What follows.

    def decisions(self, now: datetime) -> list[Decision]:
        """The next decisions: older steps first, state dicts before checkpoints of a step."""
        found: list[Decision] = []
        unfinished = [save for save in self._saves.values() if save.open]
        unfinished.sort(key=lambda s: (s.key.step, s.key.kind != "state_dict"))
        for save in unfinished:
            found.extend(decide(save, self, now, self.save_deadline))
        return found

    def find(self, key: SaveKey) -> Save | None:
        """The status of a save of the attempt in force."""
        return self._saves.get(key)

    def saves(self) -> list[Save]:
        """Every save of the attempt in force, by key."""
        return [self._saves[key] for key in sorted(self._saves, key=_order)]

    def info(self, kind: SaveKind, step: int) -> CommittedInfo | None:
        """The manifest of ``kind`` at ``step``."""
        return self._committed[kind].get(step)

    def newest(self, kind: SaveKind) -> CommittedInfo | None:
        """The manifest with the largest step."""
        of_kind = self._committed[kind]
        return of_kind[max(of_kind)] if of_kind else None

    def steps(self, kind: SaveKind) -> list[int]:
        """Committed steps, in order."""
        return sorted(self._committed[kind])

    def infos(self, kind: SaveKind) -> list[CommittedInfo]:
        """Every manifest of ``kind``, in no order."""
        return list(self._committed[kind].values())

    def last_error(self) -> str | None:
        """Error of the newest save that failed, until a newer one of its kind is committed.

        Only commits of the attempt in force count: after a resume, older attempts have later steps.
        A skipped save is none: the trainer asked for it when the volume is slow.
        """
        for save in sorted(self._saves.values(), key=lambda s: -s.key.step):
            error = save.error if save.state is SaveState.ABORTED else _lacking(save)
            if error is None or is_skip(error):
                continue
            infos = self._committed[save.key.kind].values()
            if not any(i.step > save.key.step and i.owner in self.owners for i in infos):
                return f"{save.key}: {error}"
        return None

    def _in_force(self, key: SaveKey) -> bool:
        # A check or a hint can outlive the attempt that it belongs to.
        return key.owner in self.owners

    def _save(self, key: SaveKey) -> Save:
        if key not in self._saves:
            save = self._saves[key] = Save(key)
            info = self.info(key.kind, key.step)
            if info is not None and info.owner == key.owner:
                # Its record was forgotten; it must not be opened again under its own manifest.
                save.state, save.manifest_digest = SaveState.COMMITTED, info.digest
        return self._saves[key]


def _order(key: SaveKey) -> tuple[int, str, int, str]:
    # As the keys compare themselves, at a fraction of the time.
    return key.owner.attempt, key.owner.incarnation, key.step, key.kind


def _lacking(save: Save) -> str | None:
    if save.unregistered_long:
        return (
            f"{len(save.receipts)} parts are written, but no process registered the save, which "
            "therefore cannot commit: call register with all participants"
        )
    if not save.late:
        return None
    return (
        f"committed without {', '.join(map(str, sorted(save.late)))}: written, but not registered"
    )
