"""The monitor as a process: HTTP routes, tokens, status, Events and metrics.

Begin at `app` (puts the parts together and ends them in order) and `routes`; `status` writes
`TrainingRun.status`, `event_poster` posts Events, `metrics_catalogue` declares the metrics,
`serving_routes` and `serving_news` are for servers' agents.
"""
