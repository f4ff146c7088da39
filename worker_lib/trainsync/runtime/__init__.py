"""The run as a process sees it: environment, claim, reports, and where to get everything else.

Importing this package loads neither torch nor Ray.
"""
