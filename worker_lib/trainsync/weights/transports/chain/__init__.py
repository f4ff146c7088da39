"""The wire of a broadcast: the trainer, then one explorer after the other, each passing on at once.

Begin at `chain`; `sending` and `receiving` are its two ends, `bisection` finds the member that
keeps a chain from working.
"""
