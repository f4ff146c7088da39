"""How a process's part in a run ends: with a save before the pods go, on SIGTERM, and in order.

Begin at `stopping` (what `RunContext` offers a training loop); `listener` asks the monitor whether
a save is wanted, `hook` is the pods' preStop command. `shutdown` ends a training loop on SIGTERM,
`closing` ends what a context has begun.
"""
