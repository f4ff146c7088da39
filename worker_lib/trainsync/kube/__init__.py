"""Kubernetes code that operator, monitor and command line share.

Begin at `client` (a connection, and one error for every refusal); `lease` lets one of several
processes work, `logging` writes logs as JSON, `answers` needs no kubernetes package.
"""
