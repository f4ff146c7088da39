from collections.abc import Callable
from typing import Any

from tests.unit.cli.run.api_server import ApiServer, training_run
from tests.unit.cli.run.conftest import Call

Document = Callable[..., dict[str, Any]]

ACCOUNT = {
    "unit": "GPU",
    "since": "2026-01-01T00:00:00Z",
    "goodput": 0.6667,
    "roles": [
        {"role": "Trainer", "seconds": 7200, "classes": {"train": 5400, "restart": 1800}},
        {"role": "Explorer", "seconds": 3600, "classes": {"generate": 1800, "restart": 1800}},
    ],
}


def test_the_account_is_a_table_of_classes_and_roles(call: Call, server: ApiServer) -> None:
    server.set_runs(training_run(account=ACCOUNT))
    result = call("account", "run")
    assert result.exit_code == 0
    assert "goodput 66.7% of all seconds of GPUs since 2026-01-01 00:00:00 UTC" in result.stdout
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "train 1 h 30 min 75.0%" in lines
    assert "generate 30 min 50.0%" in lines
    assert "restart 30 min 25.0% 30 min 50.0%" in lines
    assert "all 2 h 100.0% 1 h 100.0%" in lines


def test_json_is_the_status_as_it_is(document: Document, server: ApiServer) -> None:
    server.set_runs(training_run(account=ACCOUNT))
    assert document("account", "run")["account"] == ACCOUNT


def test_a_run_without_an_account_says_so(call: Call, document: Document) -> None:
    result = call("account", "run")
    assert result.exit_code == 0
    assert "nothing of run run is accounted for yet" in result.stderr
    assert document("account", "run")["account"] is None
