"""The saving and loading parts of verl's own trainer, with its engines in the same process."""

from pathlib import Path
from typing import Any

HOOK = "trainsync.integrations.verl.checkpoints"


class Workers:
    """verl's worker group of one engine, in this process: what its trainer calls."""

    def __init__(self, engine: Any) -> None:
        self.save_checkpoint = engine.save_checkpoint
        self.load_checkpoint = engine.load_checkpoint


def verls_trainer(verl_cpu: Any, directory: Path | str, *models: str) -> tuple[Any, dict[str, Any]]:
    """The saving and loading parts of verl's own trainer, with engines of these ``models``."""
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    class Noted(CheckpointCallback):  # type: ignore[misc] # verl has no types
        seen: list[str] = []  # noqa: RUF012 - of this process

        def on_save(
            self, trainer: Any, global_step: int, checkpoint_dir: str, **kwargs: Any
        ) -> None:
            self.seen.append(checkpoint_dir)

    if not Path("hf").exists():
        verl_cpu.make_model(Path("hf"))
    engines = {
        name: verl_cpu.make_engine(Path("hf"), critic=name == "critic", external_lib=HOOK)
        for name in models
    }
    trainer = object.__new__(PPOTrainerSync)
    trainer.config = OmegaConf.create(
        {
            "trainer": {
                "default_local_dir": str(directory),
                "default_hdfs_dir": None,
                "resume_mode": "auto",
                "del_local_ckpt_after_load": False,
                "save_freq": 100,
            },
            "actor_rollout_ref": {"actor": {"checkpoint": {"async_save": False}}},
            "critic": {"model": {"external_lib": HOOK}},
        }
    )
    trainer.use_critic, trainer.trainer_mode, trainer.global_steps = "critic" in models, "sync", 0
    trainer.actor_rollout_wg = Workers(engines["actor"])
    if trainer.use_critic:
        trainer.critic_wg = Workers(engines["critic"])
    trainer.train_dataloader = StatefulDataLoader(list(range(20)), batch_size=2)
    trainer.checkpoint_callback = Noted()
    return trainer, engines


def shorter(loader: Any) -> Any:
    """A dataloader of the same items but one."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(list(loader.dataset)[1:], batch_size=2)


def seen_by(verl_cpu: Any, trainer: Any, engines: dict[str, Any], batches: Any) -> dict[str, Any]:
    return {
        "step": trainer.global_steps,
        "next": next(batches).tolist(),
        "told": trainer.checkpoint_callback.seen,
        "directory": trainer.config.trainer.default_local_dir,
        "models": {name: verl_cpu.weights_fingerprint(engine) for name, engine in engines.items()},
    }
