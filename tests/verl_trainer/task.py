"""A tiny model, prompts and a reward for verl's trainer; nothing is downloaded."""

import sys
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 128
TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make_model(folder: Path) -> None:
    """A random Qwen2, and a tokenizer whose words are its tokens' numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    torch.manual_seed(0)
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
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY - 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens(["\n"])  # verl asks that a newline be one token of a Qwen
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        bos_token="w1",
        eos_token="w2",
        pad_token="w2",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def make_data(file: Path, rows: int = 64) -> None:
    """Prompts of three words, as verl reads them."""
    import pandas

    pandas.DataFrame(
        {
            "data_source": "tiny",
            "prompt": [
                [{"role": "user", "content": f"w{10 + row} w{3 + row} w{7}"}] for row in range(rows)
            ],
            "reward_model": [{"style": "rule", "ground_truth": "even"} for _ in range(rows)],
            "extra_info": [{"index": row} for row in range(rows)],
        }
    ).to_parquet(file)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """The share of even words in the response."""
    words = [int(word[1:]) for word in solution_str.split() if word[1:].isdigit()]
    return sum(number % 2 == 0 for number in words) / max(len(words), 1)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]) / "model")
    make_data(Path(sys.argv[1]) / "data.parquet")
