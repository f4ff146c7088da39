"""The monitor as a process: HTTP routes, tokens, status, Events and metrics.

Begin at `app` (puts the parts together and ends them in order) and `routes`; `status` writes
`TrainingRun.status`, `metrics_catalogue` declares the metrics.
"""
