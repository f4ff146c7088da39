"""Servers of a run: children of the run, not of an attempt.

Begin at `wanted` (what must exist); `reading` finds what exists, `carry_out` makes it so, and
`report` writes the status; `groups` knows servers of several nodes. Problems of servers are in the
condition ServersReady, and stop nothing else of the run.
"""
