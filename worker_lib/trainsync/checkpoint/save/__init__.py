"""One call of `save_*`, from the trainer's tensors to a receipt on the volume, and its outcome.

Begin at `pipeline`, whose methods run in order: `staging/` copies the state, `background` has the
threads, `part_writer` writes the files (`files/`) and the receipt. `watch` registers saves and
hears how they end; `missing` warns of a save that is not registered or lacks a part.
"""
