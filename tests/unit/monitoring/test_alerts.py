"""promtool runs the cases of alerts_test.yaml against the rules that the chart carries."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainsync.api.status import Phase

from monitoring import grafana, prometheus
from monitoring.generated import RULES_FILE, files, rules_text
from monitoring.rules import OPERATOR_ALERT, RECORDED, Pace, alerts

CASES = Path(__file__).with_name("alerts_test.yaml")


@pytest.fixture(scope="session")
def promtool() -> Path:
    return prometheus.programs().promtool


def run(promtool: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(promtool), *words], capture_output=True, text=True, timeout=60, check=False
    )


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(CASES.read_text())["tests"]
    return found


def test_alerts_fire_where_they_must_and_nowhere_else(promtool: Path, tmp_path: Path) -> None:
    file = tmp_path / "alerts_test.yaml"
    file.write_text(CASES.read_text().replace("RULES", str(RULES_FILE)))
    done = run(promtool, "test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_fleet_leaves_out_runs_that_ended_and_counts_alerts_of_the_operator(
    promtool: Path, tmp_path: Path
) -> None:
    fleet = next(path for path in files() if path.name.endswith("fleet.json"))
    panels = {panel["title"]: panel for panel in grafana.panels(json.loads(files()[fleet]))}

    def ask(title: str, index: int = 0) -> str:
        return grafana.fill(panels[title]["targets"][index]["expr"], {"namespace": "a|b"})

    def series(metric: str, values: str, **labels: str) -> dict[str, str]:
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        return {"series": f"{metric}{{{inside}}}", "values": values}

    phases = {"trains": "Running", "waits": "Restarting", "ended": "Complete", "broken": "Failed"}
    given = []
    for name, phase in phases.items():
        of = {"namespace": "a", "run": name}
        for each in Phase:
            value = "1x90" if each == phase else "0x90"
            given.append(series("trainsync_run_phase", value, **of, phase=each))
        # Recorded for as long as their monitors are there.
        given += [series(recorded, "0.5x90", **of) for recorded in RECORDED.values()]
        given.append(series("trainsync_weights_lag", "0.5x90", **of, explorer="e"))
    firing = {"alertstate": "firing"}
    operator = {"alertname": OPERATOR_ALERT, "job": "o"}
    given += [
        series("ALERTS", "1x90", **firing, **operator, namespace="operators"),
        series("ALERTS", "1x90", **firing, alertname=OPERATOR_ALERT),
        series("ALERTS", "1x90", **firing, alertname="TrainsyncRunStalled", namespace="a"),
        series("ALERTS", "1x90", **firing, alertname="TrainsyncRunStalled", namespace="other"),
    ]
    living = [
        {"labels": f'{{namespace="a", run="{name}"}}', "value": 0.5} for name in ("trains", "waits")
    ]
    trends = (
        "Goodput, the ten lowest",
        "Blocked by saves, the ten highest",
        "Oldest checkpoints",
        "Lag, the ten largest",
    )
    table = [ask("Runs", index) for index in range(len(panels["Runs"]["targets"]))]
    # Goodput, checkpoint age, steps at risk and lag.
    asked = [*(ask(title) for title in trends), *table[4:8]]
    checks = [{"expr": expr, "eval_time": "80m", "exp_samples": living} for expr in asked]
    alive = {"labels": "{}", "value": 0.5}
    checks.append({"expr": ask("Goodput"), "eval_time": "80m", "exp_samples": [alive]})
    three = {"labels": "{}", "value": 3}
    checks.append({"expr": ask("Alerts firing"), "eval_time": "80m", "exp_samples": [three]})
    file = tmp_path / "fleet_test.yaml"
    case = {"interval": "1m", "input_series": given, "promql_expr_test": checks}
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}))
    done = run(promtool, "test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires: dict[bool, set[str]] = {True: set(), False: set()}
    for case in cases():
        for check in case.get("alert_rule_test", []):
            fires[bool(check["exp_alerts"])].add(check["alertname"])
    names = {alert.name for alert in alerts(Pace())}
    assert fires[True] == names
    assert fires[False] == names


@pytest.mark.parametrize("speed", [1.0, 60.0])
def test_prometheus_accepts_the_rules_at_any_pace(
    promtool: Path, tmp_path: Path, speed: float
) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(rules_text(Pace(speed)))
    done = run(promtool, "check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
