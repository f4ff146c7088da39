"""Dashboards, alerts and the metrics' catalogue, made from code, and a Prometheus for tests.

Begin at `run` (the dashboard of one run), `rules` (alerts and recording rules) and `queries` (their
PromQL); `generated` lists the files that `python -m monitoring` (`make dashboards`) writes.
"""
