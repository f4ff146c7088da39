"""Dashboards, alerts and the metrics' catalogue, made from code, and a Prometheus for tests.

Begin at the dashboards, one file each with its panels: `run` (with `run_saves`), `fleet`,
`operator`. `rules` has alerts and recording rules, `queries` their PromQL, `panels` the builders;
`generated` lists the files that `python -m monitoring` (`make dashboards`) writes.
"""
