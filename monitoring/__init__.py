"""Dashboards, alerts and the metrics' catalogue, made from code; and a real Prometheus to try them.

`python -m monitoring` writes every generated file, which `make dashboards` does.
"""
