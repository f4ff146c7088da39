"""When to reconcile: watches put keys into a queue, workers take them.

Begin at `watch` and `worker`; `leader` lets one operator work at a time.
"""
