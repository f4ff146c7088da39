"""Files of a run's directory, on a POSIX volume, and committed saves in object storage; no torch.

Begin at `layout` (where everything is; docs/dev/contracts.md has the picture) and `saves/` (one
save, from receipts to pointers); `inspect/` finds and repairs damage and leftovers. `objects/` is a
store, the one place that speaks to a network; `copying/` moves saves between the two.
"""
