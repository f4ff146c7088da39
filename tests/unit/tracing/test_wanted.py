"""Which variables of OpenTelemetry turn traces on."""

import pytest
from trainsync.tracing.wanted import endpoint

ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        {"OTEL_TRACES_EXPORTER": "console, otlp"},
        {"OTEL_SDK_DISABLED": "false"},
        {
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        },
    ],
)
def test_an_endpoint_turns_traces_on(more: dict[str, str]) -> None:
    assert endpoint(ON | more) == "http://collector:4318"


def test_the_endpoint_of_traces_comes_first() -> None:
    traces = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://traces:4318/v1/traces"}
    assert endpoint(ON | traces) == endpoint(traces) == "https://traces:4318/v1/traces"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        ON | {"OTEL_SDK_DISABLED": "True"},
        ON | {"OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_it_or_switched_off_there_are_none(environ: dict[str, str]) -> None:
    assert endpoint(environ) is None


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', expected http/protobuf",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"},
            "OTEL_EXPORTER_OTLP_ENDPOINT is 'collector:4318', expected a URL such as",
        ),
    ],
)
def test_what_is_not_possible_is_said(more: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        endpoint(ON | more)
