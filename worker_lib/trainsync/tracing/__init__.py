"""Traces of steps by OTLP, for those who set ``OTEL_EXPORTER_OTLP_ENDPOINT``.

Begin at `steps`: `StepTracer`, with which every part of the library records what it did. `wanted`
reads the environment, `identity` makes the ids that the processes of an attempt have in common.
`exporting` alone imports OpenTelemetry, and only when an endpoint is set.
"""
