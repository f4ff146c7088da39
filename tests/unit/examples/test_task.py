"""The example's task, tokenizer and settings."""

import argparse
import subprocess
import sys

import pytest
from tiny_grpo.config import Config, ConfigError
from tiny_grpo.policy.seeding import derive_seed
from tiny_grpo.policy.task import make_prompts, reward, solve
from tiny_grpo.policy.tokenizer import (
    ALPHABET,
    VOCABULARY_SIZE,
    UnknownCharacterError,
    decode,
    encode,
)


def test_encode_and_decode_are_inverse_over_the_whole_alphabet() -> None:
    assert decode(encode(ALPHABET)) == ALPHABET
    assert sorted(encode(ALPHABET)) == list(range(VOCABULARY_SIZE))


def test_a_character_outside_the_alphabet_is_named_in_the_error() -> None:
    with pytest.raises(UnknownCharacterError, match="'x' in '12x'"):
        encode("12x")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("1349", 1.0), ("1394", 0.0), ("134", 0.0), ("13499", 0.0), ("", 0.0), ("134=", 0.0)],
)
def test_only_the_exactly_sorted_digits_earn_the_reward(answer: str, expected: float) -> None:
    assert reward("3914=", answer) == expected


def test_repeated_digits_are_kept_by_the_solution() -> None:
    assert solve("70707=") == "00777"


def test_a_stretch_of_prompts_does_not_depend_on_where_reading_began() -> None:
    whole = make_prompts(6, 3, "train", range(40))
    assert make_prompts(6, 3, "train", range(25, 40)) == whole[25:]
    assert {len(prompt) for prompt in whole} == {7}
    assert len(set(whole)) > 35


def test_streams_and_seeds_give_different_prompts() -> None:
    first = make_prompts(6, 3, "train", range(5))
    assert first != make_prompts(6, 4, "train", range(5))
    assert first != make_prompts(6, 3, "probe", range(5))


def test_seeds_are_equal_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from tiny_grpo.policy.seeding import derive_seed; print(derive_seed(1, 'rollout', 2, 3))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    assert int(output) == derive_seed(1, "rollout", 2, 3)
    assert derive_seed(1, "rollout", 2, 3) != derive_seed(1, "rollout", 23)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": 9}, "prompts is 9: expected a multiple of trainers times explorers, 4"),
        ({"prompts": 64, "explorers": 3}, "expected a multiple of trainers times explorers, 6"),
        ({"updates": 3}, "updates is 3: expected a divisor of a trainer's 256 answers"),
        ({"group_size": 1}, "a group needs 2 answers"),
        ({"steps": 0}, "steps is 0: expected more than 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**settings)  # type: ignore[arg-type]


def test_settings_survive_the_command_line() -> None:
    config = Config(seed=7, steps=3, learning_rate=1.5e-4)
    parser = argparse.ArgumentParser()
    Config.add_arguments(parser)
    assert Config.from_arguments(parser.parse_args(config.arguments())) == config
