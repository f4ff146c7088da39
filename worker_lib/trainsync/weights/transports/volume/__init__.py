"""The method `checkpoint`: explorers load a committed state dict from the run's volume.

Begin at `fetcher`. The monitor announces each commit; nothing here polls a file.
"""
