"""The run as a process sees it: environment, claim, reports, and where to get everything else.

Begin at `context` (`RunContext`, which an application holds) and `settings` (the environment);
attempt/ claims the attempt and says where it goes on; `clients` chooses the way to the monitor,
`methods` the way of the weights; relays/ carry news between the monitor and the Synchronizer, stop/
saves in time and ends in order. Importing this package loads neither torch nor Ray.
"""
