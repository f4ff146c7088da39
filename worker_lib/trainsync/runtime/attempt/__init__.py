"""The attempt that a process takes part in: claimed once, resumed from one checkpoint, restarted.

Begin at `claiming`, then `resuming`; `spmd` lets rank 0 act for ranks that were started side by
side, and `restarts` makes trainers' processes anew in the same attempt. `rescued` waits for saves
that outlive their ranks, before either.
"""
