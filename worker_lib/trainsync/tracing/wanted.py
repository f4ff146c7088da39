"""Whether traces are wanted, as OpenTelemetry's environment variables say; pure.

https://opentelemetry.io/docs/specs/otel/protocol/exporter/ and
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SPOKEN: Final = "http/protobuf"


def endpoint(environ: Mapping[str, str]) -> str | None:
    """The URL that traces go to; None: none are wanted.

    Raises:
        ValueError: traces are wanted in a way that is not possible; says why, in a sentence.
    """
    variable = next((name for name in (TRACES_ENDPOINT, ENDPOINT) if environ.get(name)), None)
    exporters = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if variable is None or disabled or "otlp" not in exporters.replace(" ", "").split(","):
        return None
    for name in PROTOCOLS:
        if protocol := environ.get(name):
            if protocol != SPOKEN:
                raise ValueError(f"{name} is {protocol!r}, expected {SPOKEN}")
            break
    url = environ[variable]
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{variable} is {url!r}, expected a URL such as http://collector:4318")
    return url
