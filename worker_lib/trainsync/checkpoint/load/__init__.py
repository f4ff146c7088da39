"""Loads a committed checkpoint: verified by its manifest, without running code from it.

Begin at `loading`; `resume` opens the checkpoint that the monitor named (`monitor.resume.choice`
chooses it), `verify` shares the check of digests among the ranks of a host, `reshard/` reads the
shards of another number of ranks.
"""
