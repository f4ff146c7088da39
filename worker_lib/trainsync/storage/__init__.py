"""Files of a run's directory, on a POSIX volume; no torch, no network.

Begin at `layout` (where everything is; docs/dev/contracts.md has the picture) and `saves/` (one
save, from receipts to pointers); `inspect/` is what a person finds and repairs.
"""
