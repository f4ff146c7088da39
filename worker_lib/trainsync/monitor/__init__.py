"""The run's monitor, which alone says what is committed.

Begin at `ledger/` (pure state) and `commit/core`; `server/` is the process in a pod, from its start
to SIGTERM, `client/` the library's side, which needs neither FastAPI nor Kubernetes.
"""
