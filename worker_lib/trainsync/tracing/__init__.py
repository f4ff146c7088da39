"""Traces of steps by OTLP, for those who set ``OTEL_EXPORTER_OTLP_ENDPOINT``.

Begin at `steps` (`StepTracer`, with which every part of the library records what it did); `wanted`
reads the environment, `identity` makes the ids, by which all processes of an attempt add to one
trace a step without telling each other. `exporting` alone imports OpenTelemetry, and only when an
endpoint is set.

Names follow the draft of OpenTelemetry's semantic conventions for reinforcement learning
(https://github.com/open-telemetry/semantic-conventions-genai/issues/88): ``rl.loop`` (a step),
``rl.sample``, ``rl.reward``, ``rl.train``, ``rl.sync``. What the draft has no name for begins with
``trainsync.``: ``save`` with ``save.stage``, ``save.write`` and ``save.commit``, ``take`` and
``wait``.
"""
