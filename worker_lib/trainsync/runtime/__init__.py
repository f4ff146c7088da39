"""The run as a process sees it: environment, claim, reports, and where to get everything else.

Begin at `context` (`RunContext`, which an application holds) and `settings` (the environment);
`clients` chooses the way to the monitor, `methods` the way of the weights, `relays` carries news
between it and the Synchronizer. Importing this package loads neither torch nor Ray.
"""
