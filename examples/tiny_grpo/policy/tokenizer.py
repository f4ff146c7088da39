"""A character tokenizer for the sorting task: ten digits and ``=``."""

from collections.abc import Iterable
from typing import Final

ALPHABET: Final = "0123456789="
VOCABULARY_SIZE: Final = len(ALPHABET)
_INDEX: Final = {character: index for index, character in enumerate(ALPHABET)}


class UnknownCharacterError(ValueError):
    """A text has a character outside of the vocabulary."""


def encode(text: str) -> list[int]:
    """Token ids of ``text``, one a character.

    Raises:
        UnknownCharacterError: A character is not in `ALPHABET`.
    """
    try:
        return [_INDEX[character] for character in text]
    except KeyError as error:
        raise UnknownCharacterError(
            f"cannot encode {error.args[0]!r} in {text!r}: expected only {ALPHABET!r}"
        ) from error


def decode(tokens: Iterable[int]) -> str:
    """The text of ``tokens``; every id must be in ``range(VOCABULARY_SIZE)``."""
    return "".join(ALPHABET[token] for token in tokens)
