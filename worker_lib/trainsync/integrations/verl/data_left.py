"""Tells when verl's trainer goes on with other data than its run began with, or with none.

verl puts its dataloader back to the saved place whatever the dataset is: with fewer or more items
it trains some twice or never, or takes no step at all, and ends with exit code 0.
"""

import json
import logging
from collections.abc import Sized
from pathlib import Path
from typing import Any, Final

from trainsync.data.errors import DataMismatchError
from trainsync.storage.layout import step_name

logger = logging.getLogger(__name__)

FILE: Final = "data_length.json"
"""Beside verl's ``data.pt``, and with it a part of the commit."""
_DATA: Final = "data.pt"


def note(trainer: Any, folder: Path) -> None:
    """Write how long the dataset is into the step's directory that ``trainer`` has written.

    Raises:
        OSError: it cannot be written.
    """
    length = _length(trainer)
    if length is not None and (folder / _DATA).exists():
        (folder / FILE).write_text(json.dumps({"items": length}))


def check(trainer: Any) -> None:
    """Compare the dataset with that of the checkpoint, and say what is left of the data.

    Args:
        trainer: verl's, which has loaded its checkpoint.

    Raises:
        DataMismatchError: the dataset has another number of items.
    """
    step, config = trainer.global_steps, trainer.config.trainer
    if step > 0:
        by_path = config.resume_mode == "resume_path"
        place = config.resume_from_path if by_path else config.default_local_dir
        folder = Path(place) if by_path else Path(place) / step_name(step)
        _compare(folder, step, _length(trainer))
    _say_what_is_left(trainer, step)


def _compare(folder: Path, step: int, length: int | None) -> None:
    try:
        saved = json.loads((folder / FILE).read_bytes())["items"]
    except FileNotFoundError:  # of an earlier release, or without a dataloader's state
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the dataset is not compared with that of step %d: %s", step, error)
        return
    if length is not None and saved != length:
        raise DataMismatchError(
            f"the run trained on {saved} items until step {step}, and verl's dataset has {length}: "
            "its dataloader would go on at another place. Give the data that the run began with, "
            "or start a new run"
        )


def _say_what_is_left(trainer: Any, step: int) -> None:
    epochs = trainer.config.trainer.get("total_epochs", None)
    wanted = getattr(trainer, "total_training_steps", None)
    if epochs is None or wanted is None:
        return
    each = getattr(trainer, "steps_per_epoch", None)
    there = (len(trainer.train_dataloader) if each is None else each) * epochs
    if step >= min(wanted, there):
        logger.warning(
            "nothing is left to train: step %d of %d, and %d epochs of the data have %d steps",
            *(step, wanted, epochs, there),
        )
    elif there < wanted:
        logger.warning(
            "verl ends after step %d of %d, with exit code 0: %d epochs of the data have no more",
            *(there, wanted, epochs),
        )


def _length(trainer: Any) -> int | None:
    """Items of the dataset; None: it does not say, or changes while it is trained on."""
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    changes = hasattr(dataset, "on_batch_end")  # verl calls it after each step
    return len(dataset) if isinstance(dataset, Sized) and not changes else None
