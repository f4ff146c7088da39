"""What the ranks of a process group agree on, always with a deadline.

Begin at `agreement`; `heartbeat` notices a rank that is gone, `store` bounds each request to the
store of the process group. Imports torch when used.
"""
