"""The monitor of a run whose checkpoints are in a store: the same ledger, with a store around it.

Begin at `core`, which answers requests and ticks, as `trainsync.monitor.core.core` does on a
volume. `executor` carries out the ledger's decisions with `verifier` and `retention`, `scan` reads
what participants have put, `term_hold` holds the run's term, `sweeps` says when `cleanup` removes
what is over, and `origin` chooses what an attempt resumes from.
"""
