"""A tiny model, prompts and a reward for verl's trainer; nothing is downloaded."""

import sys
from pathlib import Path
from typing import Any, Final

END: Final = "<|endoftext|>"
VOCABULARY: Final = 257  # all of the tokenizer: verl lets vLLM sample no others
TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def make_model(folder: Path) -> None:
    """A random Qwen2, and a tokenizer of Qwen2's kind whose tokens are the 256 bytes and END.

    transformers builds a Qwen2's tokenizer from vocabulary and merges, whatever else the folder
    says: with other than byte-level tokens every text is empty.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer

    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {END: len(letters)}
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention on CPUs takes no smaller heads
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    Qwen2Tokenizer(vocab=vocabulary, merges=[], chat_template=TEMPLATE).save_pretrained(folder)


def make_data(file: Path, rows: int = 64) -> None:
    """Prompts of three words, as verl reads them."""
    import pandas

    pandas.DataFrame(
        {
            "data_source": "tiny",
            "prompt": [
                [{"role": "user", "content": f"w{10 + row} w{3 + row} w7"}] for row in range(rows)
            ],
            "reward_model": [{"style": "rule", "ground_truth": "ascii"} for _ in range(rows)],
            "extra_info": [{"index": row} for row in range(rows)],
        }
    ).to_parquet(file)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """The share of the response's characters that are ASCII."""
    return sum(letter.isascii() for letter in solution_str) / max(len(solution_str), 1)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]) / "model")
    make_data(Path(sys.argv[1]) / "data.parquet")
