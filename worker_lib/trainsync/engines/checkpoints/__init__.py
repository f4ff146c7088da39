"""The common part of the checkpoint managers of FSDP and Megatron.

Begin at `model_saves` (the head of a save) and `save_plan` (what a checkpoint consists of);
`shard_source` says where shards are loaded from, `paths` where a save lands.
"""
