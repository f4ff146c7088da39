"""Runs a Prometheus on this machine from Debian's package, without installing the package.

Debian builds the server without Kubernetes discovery, so targets are listed by address. The package
(19 MB) is fetched once and unpacked in the cache; no service is started and root is not needed.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_PACKAGE: Final = "prometheus"
_START_SECONDS: Final = 60.0
_ASK_SECONDS: Final = 10.0
_APT_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.1


class PrometheusError(Exception):
    """Prometheus cannot be fetched, did not start, or refused a query."""


@dataclass(frozen=True)
class Programs:
    """Paths of the two programs."""

    prometheus: Path
    promtool: Path


@dataclass(frozen=True)
class Target:
    """One endpoint to scrape, with labels of its own."""

    job: str
    address: str
    path: str = "/metrics"
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """One series of an answer: labels, and times (Unix seconds) with values."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


def programs() -> Programs:
    """The programs from PATH, else from Debian's package, which is fetched if needed.

    Raises:
        PrometheusError: there is no apt-get, or it fails.
    """
    installed = shutil.which("prometheus"), shutil.which("promtool")
    if installed[0] and installed[1]:
        return Programs(Path(installed[0]), Path(installed[1]))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainsync"
    directory = cache / "debian" / _PACKAGE
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{_PACKAGE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # concurrent test runs fetch the package once
        if not directory.exists():
            _fetch(directory)
    return Programs(directory / "usr/bin/prometheus", directory / "usr/bin/promtool")


def _fetch(directory: Path) -> None:
    print(f"fetching Debian's package {_PACKAGE} (19 MB) into {directory}", flush=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        where = Path(temporary)
        try:
            _run(["apt-get", "download", "-q", _PACKAGE], where)
        except PrometheusError:
            # A new machine has no package lists.
            _run(["apt-get", "update", "-q"], where)
            _run(["apt-get", "download", "-q", _PACKAGE], where)
        (package,) = where.glob(f"{_PACKAGE}_*.deb")
        _run(["dpkg", "-x", str(package), "unpacked"], where)
        (where / "unpacked").rename(directory)


def _run(argv: Sequence[str], where: Path) -> None:
    try:
        done = subprocess.run(
            argv, cwd=where, capture_output=True, text=True, timeout=_APT_SECONDS, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise PrometheusError(
            f"`{' '.join(argv)}`: {error}; install Debian's {_PACKAGE}"
        ) from error
    if done.returncode != 0:
        raise PrometheusError(f"`{' '.join(argv)}` failed: {done.stderr.strip()[-2000:]}")


class Server:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: str, when: float | None = None) -> list[Series]:
        """An instant query, for a Unix time or now. Raises PrometheusError."""
        words = {"query": expr} if when is None else {"query": expr, "time": f"{when}"}
        return [
            Series(found["metric"], [_point(found["value"])])
            for found in self._result("query", words)
        ]

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        """A query over time. Raises PrometheusError."""
        words = {"query": expr, "start": f"{start}", "end": f"{end}", "step": f"{step}"}
        return [
            Series(found["metric"], [_point(pair) for pair in found["values"]])
            for found in self._result("query_range", words)
        ]

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """Labels of the alerts that fire, by name."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in self._ask("alerts", {})["alerts"]:
            if alert["state"] == "firing":
                labels = dict(alert["labels"])
                found.setdefault(labels.pop("alertname"), []).append(labels)
        return found

    def down(self) -> dict[str, str]:
        """The error of the last scrape of each target that is not up, by URL."""
        targets = self._ask("targets", {"state": "active"})["activeTargets"]
        return {t["scrapeUrl"]: t["lastError"] for t in targets if t["health"] != "up"}

    def _result(self, what: str, words: dict[str, str]) -> list[dict[str, Any]]:
        answer = self._ask(what, words)
        if answer["resultType"] not in ("vector", "matrix"):
            raise PrometheusError(f"{words['query']!r} is a {answer['resultType']}, not series")
        result: list[dict[str, Any]] = answer["result"]
        return result

    def _ask(self, what: str, words: dict[str, str]) -> dict[str, Any]:
        address = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(words)}"
        try:
            # S310: the address is our own server's, always http.
            with urllib.request.urlopen(address, timeout=_ASK_SECONDS) as answer:  # noqa: S310
                found: dict[str, Any] = json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{what} {words}: {error.read().decode()}") from error
        except OSError as error:
            raise PrometheusError(f"{self.url} does not answer: {error}") from error
        return found


def _point(pair: Sequence[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


@contextmanager
def running(
    directory: Path, targets: Sequence[Target], rules: str, *, scrape_seconds: float = 2.0
) -> Iterator[Server]:
    """A server that scrapes ``targets`` and evaluates ``rules`` (a rule file's text).

    Raises:
        PrometheusError: it did not start.
    """
    (directory / "rules.yaml").write_text(rules)
    interval = f"{round(scrape_seconds * 1000)}ms"
    config = {
        "global": {
            "scrape_interval": interval,
            "scrape_timeout": interval,
            "evaluation_interval": interval,
        },
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": f"{target.job}-{index}",
                "honor_labels": True,
                "metrics_path": target.path,
                "static_configs": [{"targets": [target.address], "labels": target.labels}],
            }
            for index, target in enumerate(targets)
        ],
    }
    # JSON is YAML.
    (directory / "prometheus.json").write_text(json.dumps(config))
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(programs().prometheus),
                f"--config.file={directory / 'prometheus.json'}",
                f"--storage.tsdb.path={directory / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        port = _port(process, log)
        server = Server(f"http://127.0.0.1:{port}")
        _wait_ready(server, process, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def _port(process: "subprocess.Popen[bytes]", log: Path) -> int:
    # Port 0 selects a free port, which only the log shows.
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', log.read_text())
        if found:
            return int(found[1])
        time.sleep(_POLL_SECONDS)  # between reads of the log, until the deadline
    raise PrometheusError(f"prometheus did not start:\n{log.read_text()[-2000:]}")


def _wait_ready(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            # S310: the address is our own server's, always http.
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=_ASK_SECONDS):  # noqa: S310
                return
        except urllib.error.URLError:  # 503 until ready
            time.sleep(_POLL_SECONDS)  # between requests, until the deadline
    raise PrometheusError(f"prometheus did not become ready:\n{log.read_text()[-2000:]}")
