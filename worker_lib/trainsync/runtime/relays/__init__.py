"""Threads of the process that made the Synchronizer: they carry news between it and the monitor.

Begin at `monitor_relays` (reports, commits, aborts); `call_relay` makes the calls of explorers in
other Ray clusters, `synchronizer_access` finds the Synchronizer, `synchronizer_host` makes it and
starts the relays, and `committed_weights` reads the versions of the method ``checkpoint``. Only
`committed_weights` is without Ray, which `synchronizer_access` imports when it is asked.
"""
