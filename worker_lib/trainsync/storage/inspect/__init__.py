"""Checks a run's directory as `fsck` does, and repairs the findings.

Begin at `findings`; `saves`, `pointers`, `leftovers` and `internal` each look at one part of the
directory; `repair` mends what they find.
"""
