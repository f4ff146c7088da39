"""The chart's monitors, rules and alerts with a real Prometheus that its operator runs.

Not part of `make test`: `make test-monitoring` builds both first.
"""

import json
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainsync.api import names

from demo.kubectl import wait_for
from demo.platform import CHART, Platform, devcluster_platform
from devcluster.monitoring import NAMESPACE, PROMETHEUS, SELECTED
from devcluster.shell import Progress
from tests.cluster.alive_run import AliveRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
RELEASE = "trainsync-operator-watched"
RUNS = "trainsync-watched-runs"
ALERT = "TrainsyncRunFailed"


class Prometheus:
    """The HTTP API of the Prometheus in the cluster."""

    def __init__(self, platform: Platform) -> None:
        pod = platform.kubectl.get("pod", f"prometheus-{PROMETHEUS}-0", NAMESPACE)
        assert pod is not None
        self._address = f"http://{pod['status']['podIP']}:9090/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer."""
        url = f"{self._address}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def series(self, query: str) -> list[dict[str, str]]:
        """Labels of the series that a query gives now."""
        return [result["metric"] for result in self.get("query", query=query)["result"]]

    def targets(self) -> dict[str, list[dict[str, Any]]]:
        """The targets scraped for this release, by ServiceMonitor or PodMonitor."""
        found: dict[str, list[dict[str, Any]]] = {}
        for target in self.get("targets", state="active")["activeTargets"]:
            if f"/{RELEASE}/" in target["scrapePool"]:
                found.setdefault(target["scrapePool"], []).append(target)
        return found


@pytest.fixture(scope="module")
def platform() -> Iterator[Platform]:
    made = devcluster_platform(Progress())
    subprocess.run(
        [sys.executable, "-m", "devcluster", "monitoring"], cwd=ROOT, timeout=1800, check=True
    )
    labels = [
        f"{what}.labels.{key}={value}"
        for what in ("serviceMonitor", "podMonitor", "prometheusRule")
        for key, value in SELECTED.items()
    ]
    enabled = [
        f"{what}.enabled=true" for what in ("serviceMonitor", "podMonitor", "prometheusRule")
    ]
    made.install_chart(RELEASE, [RUNS], *enabled, *labels)
    yield made
    made.run_helm("uninstall", RELEASE, "--namespace", RELEASE, "--wait")
    for namespace in (RUNS, RELEASE):
        made.kubectl.run("delete", "namespace", namespace, timeout=180)


@pytest.fixture(scope="module")
def run(platform: Platform) -> Iterator[AliveRun]:
    made = AliveRun(platform, RUNS, failure_policy={"maxRestarts": 0})
    yield made
    made.delete()


@pytest.fixture(scope="module")
def prometheus(platform: Platform, run: AliveRun) -> Prometheus:
    return Prometheus(platform)


def test_operator_monitor_and_ray_pods_are_scraped(prometheus: Prometheus) -> None:
    wanted = {
        f"serviceMonitor/{RELEASE}/{RELEASE}/0": 1,
        f"serviceMonitor/{RELEASE}/{RELEASE}-runs/0": 1,
        f"podMonitor/{RELEASE}/{RELEASE}-ray/0": 2,  # head and trainer
    }

    def up() -> bool:
        return {
            pool: sum(target["health"] == "up" for target in targets)
            for pool, targets in prometheus.targets().items()
        } == wanted

    wait_for(up, what=f"targets to be up: {wanted}", seconds=120)


@pytest.mark.parametrize(
    "query",
    [
        "trainsync_run_info",  # of the operator
        "trainsync_run_last_report_timestamp_seconds",  # of the monitor
        "ray_node_mem_used",  # of Ray
    ],
)
def test_every_series_says_which_run_it_is_about(query: str, prometheus: Prometheus) -> None:
    asked = f'{query}{{namespace="{RUNS}",run="{AliveRun.name}"}}'
    wait_for(lambda: prometheus.series(asked), what=asked, seconds=60)


def test_every_rule_of_the_chart_is_evaluated(prometheus: Prometheus) -> None:
    files = [yaml.safe_load(file.read_text()) for file in (CHART / "rules").glob("*.yaml")]
    rules = [rule for file in files for group in file["groups"] for rule in group["rules"]]
    wanted = {rule.get("alert") or rule["record"] for rule in rules}

    def healthy() -> bool:
        groups = prometheus.get("rules")["groups"]
        return wanted <= {r["name"] for g in groups for r in g["rules"] if r["health"] == "ok"}

    wait_for(healthy, what=f"rules to be evaluated: {sorted(wanted)}", seconds=90)


def test_a_run_that_fails_raises_the_alert(
    platform: Platform, run: AliveRun, prometheus: Prometheus
) -> None:
    (trainer,) = run.pods("Trainer")
    platform.kubectl.run("-n", RUNS, "delete", "pod", trainer, "--wait=false")

    def firing() -> bool:
        return any(
            (alert["labels"]["alertname"], alert["labels"].get("run"), alert["state"])
            == (ALERT, AliveRun.name, "firing")
            for alert in prometheus.get("alerts")["alerts"]
        )

    wait_for(firing, what=f"{ALERT} to fire", seconds=120)
    assert run.status()["phase"] == "Failed"
    wait_for(
        lambda: prometheus.series(
            f'trainsync_run_condition{{type="Failed",namespace="{RUNS}"}} == 1'
        ),
        what=f"the condition in {names.KIND}'s metrics",
        seconds=30,
    )
