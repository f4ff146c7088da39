"""A save before the pods go: what the trainers hear of it, and what a pod does that is told to end.

Begin at `stopping` (what `RunContext` offers a training loop); `listener` asks the monitor, `hook`
is the pods' preStop command.
"""
