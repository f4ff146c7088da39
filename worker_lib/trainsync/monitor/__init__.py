"""The run's monitor, which alone says what is committed.

Begin at `ledger/` (pure state) and `core/` (with `commit/` on a volume; `store/` in a bucket);
`server/` is the process in a pod, from its start to SIGTERM, `access/` says who may ask, `client/`
is the library's side, which needs neither FastAPI nor Kubernetes. `resume/` says where an attempt
begins, `mirror/` copies steps to a bucket, `account/` counts GPU-seconds, `exchange/` passes calls
between Ray clusters, `serving/` knows the servers' agents, `kube/` writes status and reads the run,
`page/` is for a browser.
"""
