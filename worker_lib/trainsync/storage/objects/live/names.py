"""Keys of the records of a run that saves into the store; docs/dev/contracts.md has the picture.

What participants say lies below ``run/saves/<attempt>-<incarnation>/``: each record is put once, by
one writer. The monitor lists that folder alone, and empties it as saves end. Shards lie beside
those of copies, in folders named ``run-…``, of which those of attempts that are over can go at
once.
"""

import re
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import parse_step, participant_name, step_name
from trainsync.storage.objects import keys
from trainsync.storage.saves.receipts import Participant, Receipt

RUN: Final = keys.RUN
TERM: Final = f"{RUN}/TERM.json"
SAVES: Final = f"{RUN}/saves"
ACCOUNT: Final = f"{RUN}/ACCOUNT.json"
DOUBTS: Final = f"{RUN}/doubts"
ROLLBACK: Final = f"{RUN}/ROLLBACK.json"
MEMORY_KEY: Final = f"{RUN}/memory.key"

_OWNER: Final = re.compile(r"^(0|[1-9][0-9]{0,15})-([a-z0-9]{8,32})$")
_FOLDER: Final = re.compile(r"^run-(0|[1-9][0-9]{0,15})-([a-z0-9]{8,32})-[a-z0-9]{8,32}$")
_RECORD: Final = re.compile(r"^([a-z0-9_]{1,64})\.(0|[1-9][0-9]{0,8})\.json$")
_REGISTRATION: Final = "REGISTRATION.json"
_OUTCOME: Final = "OUTCOME.json"
_RECEIPTS: Final = "receipts"
_FAILURES: Final = "failures"
_RESCUES: Final = "rescues"
_COPIES_WANTED: Final = "COPIES_WANTED"
_PINS: Final = "pins"
_COPY_HOLDERS: Final = "keepers"


def owner(attempt: int, incarnation: str) -> str:
    """The folder of all records of one incarnation."""
    return f"{SAVES}/{attempt}-{incarnation}"


def parse_owner(key: str) -> tuple[int, str] | None:
    """Attempt and incarnation of a folder right in `SAVES`; None: it is not ours."""
    match = _OWNER.match(key.rpartition("/")[2])
    return (int(match[1]), match[2]) if match else None


def copy_holders(attempt: int, incarnation: str) -> str:
    """The folder of that incarnation's processes that take copies of shards kept in memory."""
    return f"{owner(attempt, incarnation)}/{_COPY_HOLDERS}"


def save(attempt: int, incarnation: str, kind: SaveKind, step: int) -> str:
    """The folder of the records of one save."""
    return f"{owner(attempt, incarnation)}/{kind.value}/{step_name(step)}"


def registration(folder: str) -> str:
    """Key of the participants of the save in ``folder``."""
    return f"{folder}/{_REGISTRATION}"


def outcome(folder: str) -> str:
    """Key of how the save in ``folder`` ended."""
    return f"{folder}/{_OUTCOME}"


def receipt(folder: str, participant: Participant) -> str:
    """Key of a participant's receipt. Raises `UnsafePathError`: it is no name of one."""
    return f"{folder}/{_RECEIPTS}/{participant_name(participant.component, participant.rank)}.json"


def failure(folder: str, participant: Participant) -> str:
    """Key of a participant's failure; raises as `receipt`."""
    return f"{folder}/{_FAILURES}/{participant_name(participant.component, participant.rank)}.json"


def failures(folder: str) -> str:
    """The folder of failures of the save in ``folder``."""
    return f"{folder}/{_FAILURES}"


def rescues(folder: str) -> str:
    """The folder of what is said of participants whose processes died."""
    return f"{folder}/{_RESCUES}"


def rescue(folder: str, participant: Participant) -> str:
    """Key of what is said of a participant whose process died; raises as `receipt`."""
    return f"{rescues(folder)}/{participant_name(participant.component, participant.rank)}.json"


def copies_wanted(folder: str) -> str:
    """Key of what says that parts may be written from copies in memory; empty."""
    return f"{folder}/{_COPIES_WANTED}"


def pin(folder: str, step: int, participant: Participant) -> str:
    """Key of what says that a participant of the save in ``folder`` may name objects of ``step``;
    raises as `receipt`."""
    name = participant_name(participant.component, participant.rank)
    return f"{folder}/{_PINS}/{step_name(step)}.{name}"


def parse_pin(key: str) -> int | None:
    """The step that a record's key pins; None: it is no pin."""
    parsed = parse_save(key)
    if parsed is None or not is_pin(parsed[2]):
        return None
    return parse_step(parsed[2].partition("/")[2].partition(".")[0])


def is_pin(rest: str) -> bool:
    """Whether it is a pin, by what `parse_save` left of its key."""
    return rest.partition("/")[0] == _PINS


def parse_save(key: str) -> tuple[SaveKind, int, str] | None:
    """Kind, step, and the rest of a record's key below its save's folder; None: not a record."""
    parts = key.removeprefix(f"{SAVES}/").split("/", 3)
    if len(parts) < 4 or parts[1] not in set(SaveKind) or (step := parse_step(parts[2])) is None:
        return None
    return SaveKind(parts[1]), step, parts[3]


def parse_participant(rest: str) -> tuple[Participant, bool] | None:
    """The participant of a receipt or failure, by what `parse_save` left of its key.

    The second value is true of a failure. None: it is neither.
    """
    folder, _, name = rest.partition("/")
    match = _RECORD.match(name)
    if match is None or folder not in (_RECEIPTS, _FAILURES):
        return None
    return Participant(match[1], int(match[2])), folder == _FAILURES


def doubt(step: int) -> str:
    """Key of the report that the checkpoint of ``step`` could not be loaded."""
    return f"{DOUBTS}/{step_name(step)}.json"


def folder(step: int, attempt: int, incarnation: str, writer: str) -> str:
    """The folder that one part's writer alone puts shards into."""
    return f"{keys.step_objects(step)}/run-{attempt}-{incarnation}-{writer}"


def parse_folder(key: str) -> tuple[int, str] | None:
    """Attempt and incarnation of a folder of shards; None: a copy's, or not ours."""
    match = _FOLDER.match(key.rpartition("/")[2])
    return (int(match[1]), match[2]) if match else None


def shards(record: Receipt) -> dict[str, str]:
    """The key of each file that a receipt lists, by path."""
    return own_shards(record) | record.kept


def own_shards(record: Receipt) -> dict[str, str]:
    """Those of `shards` that the participant has put itself."""
    where = folder(record.step, record.attempt, record.incarnation, record.writer or "")
    return {
        entry.path: keys.shard(where, number, entry.path)
        for number, entry in enumerate(record.files)
        if entry.path not in record.kept
    }
