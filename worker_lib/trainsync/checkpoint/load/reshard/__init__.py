"""Reads a rank's part out of the shards of any number of ranks.

Begin at `plan` (pure arithmetic); `shard_files` finds the tensors in files, `read` reads them,
`model` and `optimizer` apply them.
"""
