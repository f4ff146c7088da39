"""The metrics of an agent, declared."""

from typing import Final

from trainsync.agent.admission.judgement import Verdict
from trainsync.agent.state import UpdateOutcome
from trainsync.api.metrics import Label, Metric, counter, gauge, histogram
from trainsync.engines.servers.preparing import PreparationOutcome

_FETCH_BUCKETS: Final = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PROOF_BUCKETS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)
_PAUSE_BUCKETS: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

READY: Final = gauge("trainsync_agent_ready", "1 while `/readyz` says that the server is ready.")
SERVER_UP: Final = gauge("trainsync_agent_server_up", "1 while the server answers.")
VERSION: Final = gauge("trainsync_agent_version", "Version that the server serves.", unit="steps")
NEWEST: Final = gauge("trainsync_agent_newest_version", "Newest committed version.", unit="steps")
LAG: Final = gauge("trainsync_agent_lag", "Steps that the server is behind.", unit="steps")
LAST_LOOK: Final = gauge(
    "trainsync_agent_last_look_timestamp_seconds",
    "Last time that the newest version was known.",
    unit="seconds",
)
LAST_UPDATE: Final = gauge(
    "trainsync_agent_last_update_timestamp_seconds", "Last successful update.", unit="seconds"
)
UPDATES: Final = counter(
    "trainsync_agent_updates_total",
    "Updates that ended.",
    Label("outcome", ", ".join(UpdateOutcome), len(UpdateOutcome)),
)
UPDATE_SECONDS: Final = histogram(
    "trainsync_agent_update_seconds",
    "Time from the fetch until the server serves the version, proven.",
    _FETCH_BUCKETS,
)
PAUSE_SECONDS: Final = histogram(
    "trainsync_agent_pause_seconds", "Time that an update paused the server.", _PAUSE_BUCKETS
)
PREPARATIONS: Final = counter(
    "trainsync_agent_preparations_total",
    "Versions to prepare before the pause (`--prepare-seconds`).",
    Label("outcome", ", ".join(PreparationOutcome), len(PreparationOutcome)),
)
STAGED_BYTES: Final = counter(
    "trainsync_agent_staged_bytes_total", "Bytes laid into shared memory.", unit="bytes"
)
FETCHED_BYTES: Final = counter(
    "trainsync_agent_fetched_bytes_total",
    "Bytes fetched from a bucket, or with `--fellows`.",
    Label("source", "volume, fellow, store", 3),
    unit="bytes",
)
FELLOW_FAILURES: Final = counter(
    "trainsync_agent_fellow_failures_total",
    "Files that a fellow did not give, or gave wrong.",
)
UNHELD_VERSIONS: Final = counter(
    "trainsync_agent_unheld_versions_total",
    "Versions not held in full for fellows: staging leaves no memory.",
)
PROOFS: Final = counter(
    "trainsync_agent_proofs_total",
    "Times that the server's weights were judged.",
    Label("verdict", ", ".join(Verdict), len(Verdict)),
)
PROOF_SECONDS: Final = histogram(
    "trainsync_agent_proof_seconds", "Time of a proof, answered or not.", _PROOF_BUCKETS
)
TYPICAL_OFF: Final = gauge(
    "trainsync_agent_proof_typical_off_nats",
    "Median difference from the trainer's log-probabilities, at the last proof.",
    unit="nats",
)
LARGEST_OFF: Final = gauge(
    "trainsync_agent_proof_largest_off_nats",
    "Largest difference at the last proof.",
    unit="nats",
)

CATALOGUE: Final[tuple[Metric, ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
