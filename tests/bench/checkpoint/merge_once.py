"""Child of `bench_merge_vs_verl`: one merge, after a small one in the same process.

``python -m tests.bench.checkpoint.merge_once WAY RUN RUN OUTPUT`` merges step 1 of the first run,
then of the second one into OUTPUT/1, and prints the seconds of the second merge as its last line.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

STEP: Final = 1


def ours(run: Path, output: Path) -> None:
    """By `merge_to_hf`."""
    from trainsync.api.protocol import SaveKind
    from trainsync.checkpoint.merge.merge import merge_to_hf

    merge_to_hf(run, STEP, output, kind=SaveKind.STATE_DICT, dtype="bfloat16")


def verl(run: Path, output: Path) -> None:
    """By verl's merger, which converts all weights to bf16."""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    folder = run / f"global_step_{STEP}" / "actor"
    output.mkdir()
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        target_dir=str(output),
        local_dir=str(folder),
        hf_model_config_path=str(folder / "huggingface"),
    )
    FSDPModelMerger(config).merge_and_save()


WAYS: Final[dict[str, Callable[[Path, Path], None]]] = {"ours": ours, "verl": verl}


def main() -> None:
    """See above."""
    way, *places = sys.argv[1:]
    small, large, output = map(Path, places)
    output.mkdir()
    WAYS[way](small, output / "0")
    started = time.perf_counter()
    WAYS[way](large, output / "1")
    print(time.perf_counter() - started)


if __name__ == "__main__":
    main()
