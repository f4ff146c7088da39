"""Requests of tests to a running monitor, without the library's client."""

import httpx
from prometheus_client.parser import text_string_to_metric_families
from trainsync.api import names

from tests.unit.monitor.fakes import RunningMonitor
from tests.unit.monitor.saves import FIRST


def metrics(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = httpx.get(f"{url}/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("namespace"), labels.pop("run")) == ("training", "run")
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def sent(monitor: RunningMonitor, token: str | None, **headers: str) -> httpx.Response:
    sent_headers = {names.HEADER_ATTEMPT: "0", names.HEADER_INCARNATION: FIRST.incarnation}
    if token is not None:
        sent_headers["Authorization"] = f"Bearer {token}"
    return httpx.get(f"{monitor.url}/v1/resume", headers={**sent_headers, **headers})
