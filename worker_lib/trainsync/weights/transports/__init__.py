"""How a version's bytes reach an explorer: a package for each way, behind `base.WeightSource`.

`broadcast/` is the method `nccl` (its ways are `chain/`, `process_group/` and `shared_memory/`),
`object_store/` the method `memory`, `volume/` the method `checkpoint`.
"""
