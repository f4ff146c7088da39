"""One call of `save_*`, from the trainer's tensors to a receipt on the volume.

Begin at `pipeline`; `staging/` copies the state, `files/` writes it, `part_writer` leaves the
receipt, `registration` and `commit_watch` are the side of the process that registers the save.
"""
