"""The trainsync Kubernetes operator.

Begin at `app`, which connects the parts; `controller.worker` takes runs, `reconcile.reconcile`
brings one to its spec.
"""
