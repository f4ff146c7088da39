"""When to reconcile: watches feed the store and put keys into a queue, workers take them.

Begin at `reflector`, `watch` and `worker`; `leader` lets one operator work at a time.
"""
