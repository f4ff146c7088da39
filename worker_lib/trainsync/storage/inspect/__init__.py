"""What a person finds in a run's directory: `fsck`-like findings, and their repair.

Begin at `findings`; `saves`, `pointers`, `leftovers` and `internal` each look at one part of the
directory; `repair` mends what they find.
"""
