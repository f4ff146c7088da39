"""The run's monitor: a ledger (pure), the core that acts on it, and thin fronts and clients.

`trainsync.monitor.client.base` is what the library uses and needs neither FastAPI nor Kubernetes.
"""
