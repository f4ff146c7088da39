"""The small files beside a Megatron model's shards that a merge needs."""

import json
import tempfile
from pathlib import Path
from typing import Any

from trainsync.engines.hf.config import FOLDER, origin_generation_config
from trainsync.engines.megatron.layout import ParallelLayout

LAYOUT_FILE = "megatron_config.json"


def megatron_files(model_config: Any, layout: ParallelLayout) -> dict[str, bytes]:
    """``megatron_config.json`` with the layout, and ``huggingface/…`` with the model's
    configuration and its tokenizer or processor, where they exist.

    Args:
        model_config: from verl's engine or a `TrainedMegatron`; None without one.

    Returns:
        path relative to the folder of the shards → content.
    """
    from megatron.core import package_info

    about = {"sizes": layout.sizes, "megatron_core": package_info.__version__}
    files = {LAYOUT_FILE: (json.dumps(about, indent=4) + "\n").encode()}
    with tempfile.TemporaryDirectory(prefix="trainsync-hf-") as name:
        folder = Path(name)
        config = getattr(model_config, "hf_config", None)
        if config is not None:
            config.save_pretrained(str(folder))
            generation = origin_generation_config(config)
            if generation is not None:
                generation.save_pretrained(str(folder))
        processing = model_config.get_processor() if model_config is not None else None
        if processing is not None:
            processing.save_pretrained(str(folder))
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                files[f"{FOLDER}/{path.relative_to(folder)}"] = path.read_bytes()
    return files
