"""All settings that affect training, in one frozen value."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Self


class ConfigError(ValueError):
    """Two settings contradict each other."""


@dataclass(frozen=True)
class Config:
    """Settings of one training run; two runs with equal settings take equal steps."""

    seed: int = 0
    steps: int = 60
    trainers: int = 2
    explorers: int = 2
    # Task: how many digits to sort.
    digits: int = 6
    # Model: 0.3 M parameters.
    hidden_size: int = 128
    layers: int = 2
    # Supervised warm-up: the base model then sorts about one prompt in four.
    base_steps: int = 60
    base_batch: int = 64
    base_learning_rate: float = 2e-3
    # GRPO: prompts of one step, answers to each, and optimizer updates on them.
    prompts: int = 64
    group_size: int = 8
    updates: int = 2
    clip: float = 0.2
    learning_rate: float = 4e-4
    learning_rate_warmup: int = 16
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        """Refuse settings that give ranks or explorers unequal work.

        Raises:
            ConfigError: Names the two settings.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "seed" and value <= 0:
                raise ConfigError(f"{field.name} is {value}: expected more than 0")
        if self.group_size < 2:
            raise ConfigError("group_size is 1: a group needs 2 answers to compare")
        # Each explorer's batch must split evenly among the trainers.
        if self.prompts % (self.trainers * self.explorers):
            raise ConfigError(
                f"prompts is {self.prompts}: expected a multiple of trainers times explorers,"
                f" {self.trainers * self.explorers}"
            )
        answers = self.prompts // self.trainers * self.group_size
        if answers % self.updates:
            raise ConfigError(
                f"updates is {self.updates}: expected a divisor of a trainer's {answers} answers"
            )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """One ``--option`` for every field, with its default."""
        for field in dataclasses.fields(cls):
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=type(field.default),
                default=field.default,
                help=f"default {field.default}",
            )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """The settings parsed by `add_arguments`; other attributes are ignored.

        Raises:
            ConfigError: Two settings contradict each other.
        """
        return cls(
            **{field.name: getattr(arguments, field.name) for field in dataclasses.fields(cls)}
        )

    def arguments(self) -> list[str]:
        """The command-line arguments from which `from_arguments` makes this value."""
        return [
            text
            for field in dataclasses.fields(self)
            for text in (f"--{field.name.replace('_', '-')}", str(getattr(self, field.name)))
        ]
