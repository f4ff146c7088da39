"""Dashboards, alerts and the metrics' catalogue, made from code, and a Prometheus for tests.

`python -m monitoring` writes every generated file, which `make dashboards` does.
"""
