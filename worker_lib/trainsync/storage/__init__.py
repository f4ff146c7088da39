"""Files of a run's directory: atomic writes, layout, receipts, manifests, pointers, retention.

Pure Python over a POSIX file system; no torch, no network. The layout is described in
docs/dev/contracts.md and has its one source in `trainsync.storage.layout`.
"""
