"""The trainsync Kubernetes operator.

Begin at `app`, which connects the parts; `controller.worker` takes runs, `reconcile.reconcile`
brings one to its spec. `builders/` makes the children, `kube/` has the client and the store of what
the watches told, `metrics/` what Prometheus reads.
"""
