"""Requests to a store: their bounds, and what their errors mean.

Begin at `failures` (an error of obstore becomes one of ours); `timed` ends reads at a deadline,
`breaker` spares a store that is away, `transfer` does several requests at once, `bandwidth` bounds
the bytes a second.
"""
