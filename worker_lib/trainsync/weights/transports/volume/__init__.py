"""The method `checkpoint`: explorers load a committed state dict from the run's volume or bucket.

Begin at `fetcher` (on a volume) or `stored` (in a bucket). The monitor announces each commit;
nothing here polls a file.
"""
