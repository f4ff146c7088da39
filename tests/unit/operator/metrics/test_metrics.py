"""A scrape of the operator has the catalogue's metrics."""

from aiohttp import ClientSession
from prometheus_client import CollectorRegistry
from trainsync.api.failure_policy import FailureClass
from trainsync.api.names import MAX_RUN_AND_CLUSTER_NAME
from trainsync.api.status import Phase
from trainsync_operator.metrics import catalogue, health
from trainsync_operator.metrics.catalogue import CATALOGUE, MOST_RUNS
from trainsync_operator.metrics.metrics import Metrics
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.decide.failures import Reason
from trainsync_operator.reconcile.decide.stopping import StopOutcome
from trainsync_operator.reconcile.observed import JobPhase
from trainsync_operator.reconcile.run import Key, Run, State

from tests.unit.operator.support import START, healthy, job, make_run, with_servers

KEY = Key("team", "tiny")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def show(metrics: Metrics, run: Run, attempt: int = 0) -> None:
    state = State(begun=True, attempt=attempt, restarts=attempt, start_time=START)
    observed = healthy((job(JobPhase.RUNNING, attempt=attempt),))
    metrics.seen(run, status.build(run, state, observed, START))


def samples(metrics: Metrics) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if "_created" not in sample.name
    }


def of_run(found: Samples, name: str, **labels: str) -> float:
    wanted = {"namespace": "team", "run": "tiny", **labels}
    return found[name, tuple(sorted(wanted.items()))]


def test_a_run_has_one_info_and_its_conditions_and_leaves_nothing_behind() -> None:
    metrics = Metrics(CollectorRegistry())
    run = make_run()
    for attempt in range(2):
        show(metrics, run, attempt)
    found = samples(metrics)
    (info,) = [dict(labels) for name, labels in found if name == "trainsync_run_info"]
    assert info == {
        "namespace": "team",
        "run": "tiny",
        "uid": "uid-of-run",
        "phase": "Restarting",
        "attempt": "1",
    }
    phases = {phase: of_run(found, "trainsync_run_phase", phase=phase) for phase in Phase}
    assert phases.pop(Phase.RESTARTING) == 1
    assert set(phases.values()) == {0}
    assert of_run(found, "trainsync_run_condition", type="Ready") == 1
    assert of_run(found, "trainsync_run_condition", type="Failed") == 0
    assert of_run(found, "trainsync_run_restarts_total") == 1
    assert of_run(found, "trainsync_run_start_timestamp_seconds") == START.timestamp()
    assert of_run(found, "trainsync_run_checkpoint_interval_steps") == 100
    metrics.gone(KEY)
    assert [name for name, _ in samples(metrics) if name.startswith("trainsync_run")] == []
    metrics.gone(KEY)


def test_causes_are_counted_for_each_run_until_another_one_has_its_name() -> None:
    metrics = Metrics(CollectorRegistry())
    show(metrics, make_run())
    metrics.attempt_failed(KEY, Reason.TRAINER_POD_LOST, FailureClass.APPLICATION)
    metrics.attempt_failed(KEY, Reason.NODE_LOST, FailureClass.INFRASTRUCTURE)
    metrics.attempt_failed(KEY, Reason.PREEMPTED, None)
    metrics.stop_ended(KEY, StopOutcome.LATE)
    show(metrics, make_run())
    found = samples(metrics)
    assert of_run(found, "trainsync_run_failures_total", reason="TrainerPodLost") == 1
    assert of_run(found, "trainsync_run_failures_total", reason="PodStuck") == 0
    assert of_run(found, "trainsync_run_stop_saves_total", outcome="late") == 1
    assert of_run(found, "trainsync_run_stop_saves_total", outcome="saved") == 0
    for failure_class in FailureClass:
        failed = "trainsync_run_failures_by_class_total"
        ended = failure_class in (FailureClass.APPLICATION, FailureClass.INFRASTRUCTURE)
        assert of_run(found, failed, **{"class": failure_class}) == int(ended)
    show(metrics, make_run(uid="second"))
    found = samples(metrics)
    assert of_run(found, "trainsync_run_failures_total", reason="TrainerPodLost") == 0


def test_a_scrape_shows_what_the_catalogue_declares_and_nothing_else() -> None:
    metrics = Metrics(CollectorRegistry())
    run = make_run(with_servers({"name": "rollout"}))
    show(metrics, run)
    done = status.build(
        run,
        State(begun=True, start_time=START, completion_time=START),
        healthy((job(JobPhase.RUNNING),)),
        START,
    )
    metrics.seen(run, done)
    metrics.succeeded()
    metrics.api_request("get", "pods", "200", 0.1)
    shown = {family.name: family for family in metrics.registry.collect()}
    assert set(shown) == {metric.name.removesuffix("_total") for metric in CATALOGUE}
    for metric in CATALOGUE:
        family = shown[metric.name.removesuffix("_total")]
        assert family.type == metric.type
        assert family.samples, f"{metric.name} has no sample"
        labels = set(family.samples[0].labels) - {"le"}
        assert labels == set(metric.label_names)


def test_series_are_bounded_for_each_run() -> None:
    for metric in CATALOGUE:
        per_run = metric.label_names[:2] == ("namespace", "run")
        series = metric.most_series / (MOST_RUNS if per_run else 1)
        assert series <= 1500, f"{metric.name}: {series} series"
    assert catalogue.FAILURES.most_series == MOST_RUNS * len(Reason)


async def test_a_reconcile_names_its_run_as_exemplar_where_the_scraper_takes_them() -> None:
    metrics = Metrics(CollectorRegistry())
    # As long as names can be: prometheus_client refuses exemplars of more than 128 characters.
    longest = Key("n" * 63, "r" * (MAX_RUN_AND_CLUSTER_NAME - 1))
    metrics.reconciled(longest, 0.2)
    server = await health.serve(0, metrics.registry, alive=lambda: True, ready=lambda: True)
    try:
        # IPv4 and IPv6 have separate ports: another process may use the same number.
        port = next(address[1] for address in server.addresses if address[0] == "0.0.0.0")
        url = f"http://127.0.0.1:{port}/metrics"
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        async with ClientSession() as client:
            async with client.get(url, headers={"Accept": accept}) as answer:
                assert answer.content_type == "application/openmetrics-text"
                exemplar = f'# {{namespace="{longest.namespace}",run="{longest.name}"}} 0.2'
                assert exemplar in await answer.text()
            async with client.get(url) as answer:
                assert answer.content_type == "text/plain"
                assert longest.name not in await answer.text()
    finally:
        await server.cleanup()
