"""The model as a Hugging Face folder, for ``vllm serve``; nothing is downloaded.

``python -m vllm_grpo.model_folder FOLDER`` writes it.
"""

import sys
from pathlib import Path
from typing import Any, Final

from tiny_grpo.config import Config
from tiny_grpo.policy.model import build_model
from tiny_grpo.policy.tokenizer import ALPHABET
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

_UNKNOWN: Final = ALPHABET[-1]


def write_model(folder: Path, config: Config) -> Path:
    """Configuration, tokenizer and the random weights that the policy begins with.

    A server loads these; it is ready when its agent has brought it a version of the run.
    """
    logs: Any = logging
    logs.disable_progress_bar()
    model: Any = build_model(config)
    # vLLM generates a token to give log-probabilities of a prompt, also of one that is full length.
    model.config.max_position_embeddings = 4 * config.digits
    model.save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({c: n for n, c in enumerate(ALPHABET)}, unk_token=_UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=tokenizer, unk_token=_UNKNOWN).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), Config())
