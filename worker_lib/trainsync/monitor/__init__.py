"""The run's monitor, which alone says what is committed.

Begin at `ledger/` (pure state) and `commit/core`; `server/` is the process in a pod, `client/` the
library's side, which needs neither FastAPI nor Kubernetes.
"""
