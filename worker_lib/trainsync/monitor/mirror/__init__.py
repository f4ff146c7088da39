"""Copies committed steps to a bucket, behind training (`spec.checkpoint.mirror`).

Begin at `worker`, the one thread; `decision` says what is copied next and what is dropped (pure).
The copying itself is `trainsync.storage.copying`.
"""
