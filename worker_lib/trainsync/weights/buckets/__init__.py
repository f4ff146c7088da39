"""Tensors as streams of buckets: the same layout on both sides, from the schema alone.

Begin at `layout`; `tensor_stream` fills buckets at the trainer, `served` is the explorer's set of
tensors that the next version is written to.
"""
