"""Adds the state of verl's trainer (dataloader, TransferQueue) to the run's commits.

verl's trainers write ``data.pt`` and ``transfer_queue/`` into ``global_step_N/`` themselves, after
the models are staged. During a save, ours gives the trainer a separate directory in place of the
run's. The commit takes the files there together with the models, so only the monitor writes into
the step's directory, under any user and umask of the trainer. Of a run in a store the directory is
a temporary one, and the files go to the rank that saves them by Ray: `stored_run`.
"""

import functools
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from trainsync.api import env
from trainsync.engines.checkpoints.arguments import TRAINER, held_directory
from trainsync.integrations.verl import data_left, stop_requests, stored_run
from trainsync.storage import atomic
from trainsync.storage.layout import step_name

logger = logging.getLogger(__name__)

_HOOK: Final = "trainsync.integrations.verl.checkpoints"
_DECIDES: Final = "should_save_ckpt_esi"
_TRAINERS: Final = (
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer"),
    ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer"),
)


def install() -> None:
    """Patch the trainers imported by this process to save through the run; a second call does
    nothing."""
    for module, name in _TRAINERS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and not hasattr(kind._save_checkpoint, "verls"):
            kind._save_checkpoint = _through_the_run(kind._save_checkpoint)
            kind._load_checkpoint = _checked(kind._load_checkpoint)
            loop = sys.modules[module]
            decides = getattr(loop, _DECIDES, None)
            if decides is not None and not hasattr(kind, "on_step_end"):
                setattr(loop, _DECIDES, stop_requests.or_asked(decides))


def _checked(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(load)
    def load_checkpoint(self: Any) -> Any:
        if self.use_critic:
            _check_critic(self.config)
        stop_requests.listen(self)
        with stored_run.resumable(self):
            loaded = load(self)
            data_left.check(self)
            return loaded

    return load_checkpoint


def _check_critic(config: Any) -> None:
    """Raises `ValueError` if the critic's saves would bypass the run."""
    given = config.critic.model.get("external_lib", None)
    if _HOOK not in ([given] if isinstance(given, str) else given or []):
        raise ValueError(
            f"critic.model.external_lib is {given!r}; expected {_HOOK}, as for the actor: else the "
            "critic is saved without the run, and no checkpoint holds it"
        )


def _through_the_run(save: Callable[[Any], None]) -> Callable[[Any], None]:
    made: list[Path] = []

    @functools.wraps(save)
    def save_checkpoint(self: Any) -> None:
        url = stored_run.store_of(self.config.trainer)
        asked = stop_requests.state() == "wait"
        if url is None:
            run = Path(self.config.trainer.default_local_dir).absolute()
            cluster = os.environ.get(env.CLUSTER, "main")
            if not made:
                _remove_leftovers(run, cluster)
            aside = held_directory(run, f"{cluster}-{secrets.token_hex(8)}")
            made[:] = [aside]
            atomic.make_directory(aside, durably=False)
            _save_aside(save, self, aside, str(run), in_store=False)
        else:
            with stored_run.directory_for(url) as place:
                aside = held_directory(place, "main")
                aside.mkdir(parents=True)
                _save_aside(save, self, aside, url, in_store=True)
        stop_requests.saved(self, asked)

    save_checkpoint.verls = save  # type: ignore[attr-defined]
    return save_checkpoint


def _save_aside(
    save: Callable[[Any], None], trainer: Any, aside: Path, run: str, *, in_store: bool
) -> None:
    """Let verl's trainer save with ``aside`` in place of the run's directory or URL ``run``."""
    step = step_name(trainer.global_steps)
    with _directory(trainer.config.trainer, aside), _callback(trainer, f"{run}/{step}"):
        save(trainer)
        data_left.note(trainer, aside / step)
        # The trainer's last call for the step: the actor's first rank collects the files written
        # so far.
        carried = stored_run.carried(aside / step) if in_store else None
        trainer.actor_rollout_wg.save_checkpoint(
            str(aside / step / TRAINER), carried, trainer.global_steps
        )


def _remove_leftovers(run: Path, cluster: str) -> None:
    """Remove files left by killed trainers of earlier attempts on this cluster."""
    for path in held_directory(run, "").glob(f"{cluster}-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _directory(config: Any, aside: Path) -> Iterator[None]:
    before = config.default_local_dir
    config.default_local_dir = str(aside)
    try:
        yield
    finally:
        config.default_local_dir = before


@contextmanager
def _callback(trainer: Any, folder: str) -> Iterator[None]:
    """Context that delays ``on_save`` of verl's callback to the end and passes the real folder."""
    callback = getattr(trainer, "checkpoint_callback", None)
    if callback is None:  # older trainers have none
        yield
        return
    calls: list[dict[str, Any]] = []
    trainer.checkpoint_callback = _Noted(calls)
    try:
        yield
    finally:
        trainer.checkpoint_callback = callback
    for call in calls:
        callback.on_save(**{**call, "checkpoint_dir": folder, "async_save": True})


class _Noted:
    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self._calls = calls

    def on_save(self, **call: Any) -> None:
        self._calls.append(call)
