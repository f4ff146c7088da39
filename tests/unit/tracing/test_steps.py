"""What is recorded, against a real receiver; and that no endpoint holds up training."""

import pickle
import subprocess
import sys
import time
import types
from collections.abc import Callable

import pytest
from trainsync.tracing import steps
from trainsync.tracing.recorded import TraceStats
from trainsync.tracing.steps import StepTracer

from tests.unit.tracing.receiver import receiving

SendTo = Callable[[str], None]
TRACER = StepTracer("c0ffee")


def test_spans_of_a_step_are_one_trace_under_the_step(send_to: SendTo) -> None:
    with receiving() as receiver:
        send_to(receiver.url)
        steps.start({"rl.run.id": "u-1", "service.name": "trainsync"})
        began = time.time()
        with TRACER.span(7, "rl.train"), TRACER.span(7, "inside", {"n": 2}):
            pass
        with pytest.raises(KeyError), TRACER.span(7, "rl.reward"):
            raise KeyError("no answer")
        TRACER.record(7, "part", began, under=("save", 3))
        TRACER.record(7, "trainsync.save", began, key=("save", 3), error=OSError("disk full"))
        TRACER.record(7, "rl.loop", began, began + 2, key=())
        TRACER.record(8, "rl.loop", began, key=())
        assert steps.flush(10)
        spans = {(s.name, s.attributes["trainsync.step"]): s for s in receiver.spans}
        assert set(receiver.traces()) == {7, 8}
    step = spans["rl.loop", 7]
    assert step.parent == "" and step.ended - step.began == pytest.approx(2)
    assert step.began == pytest.approx(began, abs=1e-3)
    assert step.resource["rl.run.id"] == "u-1" and step.resource["service.name"] == "trainsync"
    for name in ("rl.train", "rl.reward", "trainsync.save"):
        assert spans[name, 7].parent == step.id
    assert spans["inside", 7].parent == spans["rl.train", 7].id
    assert spans["inside", 7].attributes["n"] == 2
    assert spans["part", 7].parent == spans["trainsync.save", 7].id
    assert {s.name for s in spans.values() if s.failed} == {"rl.reward", "trainsync.save"}
    assert steps.stats() == TraceStats(ended=7, sent=7)


def test_another_process_adds_to_the_trace(send_to: SendTo) -> None:
    code = (
        "import pickle, sys; from trainsync.tracing import steps; steps.start({})\n"
        "with pickle.loads(bytes.fromhex(sys.argv[1])).span(7, 'rl.reward'): pass\n"
    )
    with receiving() as receiver:
        send_to(receiver.url)
        steps.start({})
        TRACER.record(7, "rl.loop", time.time(), key=())
        argument = pickle.dumps(TRACER).hex()
        subprocess.run([sys.executable, "-c", code, argument], check=True, timeout=60)
        reward, step = sorted(
            receiver.wait(lambda spans: len(spans) == 2), key=lambda span: span.parent, reverse=True
        )
    assert (reward.trace, reward.parent) == (step.trace, step.id)


def test_the_variables_of_opentelemetry_name_and_sample(
    send_to: SendTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    with receiving() as receiver:
        send_to(receiver.url)
        steps.start({"service.name": "trainsync"})
        for step in range(200):
            TRACER.record(step, "rl.loop", time.time(), key=())
            TRACER.record(step, "rl.train", time.time())
        assert steps.flush(10)
        traces = receiver.traces()
    assert 60 < len(traces) < 140
    assert all(len(spans) == 2 for spans in traces.values()), "a trace is there whole, or not"
    assert receiver.spans[0].resource["service.name"] == "mine"


def test_an_endpoint_that_hangs_holds_up_nothing(
    send_to: SendTo, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving(hangs=True) as receiver:
        send_to(receiver.url)
        steps.start({})
        began = time.monotonic()
        slowest = 0.0
        for step in range(10_000):  # the queue holds 2048
            before = time.thread_time()
            TRACER.record(step, "rl.train", time.time())
            slowest = max(slowest, time.thread_time() - before)
        assert slowest < 0.5
        assert receiver.wait(lambda _: receiver.requests > 0) == []
        assert time.monotonic() - began < 30
        before = time.monotonic()
        steps.stop(timeout=1)
        assert time.monotonic() - before < 8, "the end has a deadline"
    assert "10000 of 10000 spans did not reach" in caplog.text


@pytest.mark.parametrize("status", [400, 503])
def test_spans_that_an_endpoint_refuses_are_counted(
    send_to: SendTo,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    # A refusal that may pass is tried again so long.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    with receiving(status) as receiver:
        send_to(receiver.url)
        steps.start({})
        TRACER.record(1, "rl.train", time.time())
        assert steps.flush(20)
        assert steps.stats() == TraceStats(ended=1, refused=1)
        receiver.status = 200
        TRACER.record(2, "rl.train", time.time())
        assert steps.flush(20)
        assert steps.stats() == TraceStats(ended=2, sent=1, refused=1)
        steps.stop()
    assert f"1 of 2 spans did not reach {receiver.url}" in caplog.text


def test_an_endpoint_that_is_not_there_holds_up_nothing(send_to: SendTo) -> None:
    with receiving() as receiver:
        pass  # its port is free now
    send_to(receiver.url)
    steps.start({})
    TRACER.record(1, "rl.train", time.time())
    before = time.monotonic()
    steps.stop(timeout=1)
    assert time.monotonic() - before < 8


def test_a_process_that_ends_sends_what_it_has(send_to: SendTo) -> None:
    code = (
        "import time; from trainsync.tracing import steps; steps.start({})\n"
        "steps.StepTracer('a').record(1, 'rl.train', time.time())\n"
    )
    with receiving() as receiver:
        send_to(receiver.url)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        assert [span.name for span in receiver.spans] == ["rl.train"]


def test_a_package_that_is_missing_is_named_and_training_goes_on(
    send_to: SendTo, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.delitem(sys.modules, "trainsync.tracing.exporting", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    send_to("http://127.0.0.1:1")
    steps.start({})
    assert not steps.is_on()
    assert f"no traces are sent: they need {package}" in caplog.text
    assert "pip install '.[otlp]'" in caplog.text


def test_packages_that_do_not_fit_are_said_and_training_goes_on(
    send_to: SendTo, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.delitem(sys.modules, "trainsync.tracing.exporting", raising=False)
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    send_to("http://127.0.0.1:1")
    steps.start({})
    assert not steps.is_on()
    assert "no traces are sent: OpenTelemetry cannot begin: ImportError" in caplog.text


def test_a_wrong_variable_is_said_and_training_goes_on(
    send_to: SendTo, caplog: pytest.LogCaptureFixture
) -> None:
    send_to("collector:4318")
    steps.start({})
    with TRACER.span(1, "rl.train"):
        pass
    assert "no traces are sent: OTEL_EXPORTER_OTLP_ENDPOINT is 'collector:4318'" in caplog.text
