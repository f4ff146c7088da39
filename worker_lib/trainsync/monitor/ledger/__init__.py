"""Pure state: which saves are open, complete, committed or aborted, and what follows from that.

Begin at `ledger` (the state machine) and `decisions` (what to do next); `saves` describes one
save. No module here reads a clock or a disk.
"""
