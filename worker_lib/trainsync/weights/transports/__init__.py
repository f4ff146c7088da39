"""Transports that carry a version to explorers. Begin at `base.WeightSource`.

`broadcast/` is the method `nccl` (its ways are `chain/`, `process_group/` and `shared_memory/`),
`object_store/` the method `memory`, `volume/` the method `checkpoint`, `anchors/` the method
`store`.
"""
