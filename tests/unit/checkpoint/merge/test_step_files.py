from dataclasses import replace

from trainsync.checkpoint.merge.step_files import StepFiles
from trainsync.storage.block_digests import beside
from trainsync.storage.saves.receipts import FileEntry

from tests.unit.storage.objects.memory import manifest_of

SHARD = "actor/model_world_size_1_rank_0.pt"
SMALL = ("config.json", "tokenizer.json")


def test_a_merge_takes_no_digests_of_a_run_in_a_store_into_the_models_folder() -> None:
    folder = "actor/huggingface"
    paths = (SHARD, *(f"{folder}/{name}" for name in (*SMALL, "model.safetensors")))
    (any_file,) = manifest_of(5).files
    files = tuple(
        FileEntry(path, any_file.bytes, any_file.digest)
        for path in (*paths, *(beside(path) for path in paths))
    )
    found = StepFiles.of(replace(manifest_of(5), files=files), "actor")
    assert sorted(found.small) == sorted(SMALL)
    assert [entry.path for entry in found.shards] == [SHARD]
