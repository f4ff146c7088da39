"""What the operator and the monitor share of Kubernetes.

Begin at `client` (a connection, and one error for every refusal); `lease` lets one of several
processes work, `logging` writes logs as JSON.
"""
