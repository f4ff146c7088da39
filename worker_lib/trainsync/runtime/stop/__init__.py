"""A save before the pods go: how trainers learn that one is asked for, and how a pod's end waits.

Begin at `stopping` (what `RunContext` offers a training loop); `listener` asks the monitor, `hook`
is the pods' preStop command.
"""
