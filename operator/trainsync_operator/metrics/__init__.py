"""Prometheus metrics and health of the operator.

Begin at `catalogue` (each metric is declared there).
"""
