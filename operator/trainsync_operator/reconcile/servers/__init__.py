"""Servers of a run: children of the run, not of an attempt.

Begin at `wanted` (what must exist); `reading` finds what exists, `carry_out` makes it so (but does
not ask again for what was just refused: `reconcile.refusals`), and `report` tells of it; `groups`
knows servers of several nodes. What goes
wrong with servers is told of in the condition ServersReady, and keeps nothing else of the run from
going on.
"""
