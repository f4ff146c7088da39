"""A run that saves straight into a store, with no volume: the records beside its commits.

Nobody holds a lock there. Two conditional puts decide who may commit:

- ``run/TERM.json`` names the attempt in force, its incarnations, and the one monitor that may
  commit. A claim, or another monitor, replaces it (`If-Match`); from then on whatever the monitor
  before tries to replace is refused (412).
- A monitor first replaces it with its *intent*, the whole manifest, then reserves the manifest's
  key by a mark, sees that the term is still its own, puts the manifest in the mark's place
  (`If-Match`), and moves the pointer. Who takes the term finishes the intent it finds, and the mark
  is gone: so a put that is late is refused, also when the step was removed since, and an attempt
  that is over commits nothing.

What participants say lies below ``run/saves/<attempt>-<incarnation>/``: each record is put once, by
one writer. The monitor lists that folder alone, and empties it as saves end. Shards lie beside
those of copies, in folders named ``run-…``, of which those of attempts that are over can go at
once. Begin at `names` (where everything is), `records` (what participants and monitor say of a
save) and `term`; `upload` brings bytes that are made while they go.
"""
