"""Proves a server's weights by its answers for canaries, before the server is ready."""

import logging
import time

from trainsync.agent.admission.judgement import Judgement, Verdict
from trainsync.agent.metrics import AgentMetrics
from trainsync.agent.shared_state import SharedState
from trainsync.agent.state import ReportedWeights
from trainsync.agent.version import Version
from trainsync.agent.watching import ServerWatch
from trainsync.engines.servers.base import ServerDriver
from trainsync.engines.servers.errors import ServerError
from trainsync.engines.servers.proving import ServerProver
from trainsync.failpoints import failpoint
from trainsync.weights.errors import WeightsError
from trainsync.weights.proof.comparing import Proven
from trainsync.weights.proof.record import Proof

_LOG = logging.getLogger(__name__)


class RefutedError(WeightsError):
    """The server computes with other weights than those of its version."""


class UnprovenError(WeightsError):
    """The server did not answer for its canaries."""


class FellAsleepError(WeightsError):
    """The server sleeps: its weights are judged after waking up."""


class Admission:
    """Judges the weights of one server, from version to version. One thread."""

    def __init__(
        self, shared: SharedState, watch: ServerWatch, driver: ServerDriver, metrics: AgentMetrics
    ) -> None:
        self._shared = shared
        self._watch = watch
        self._driver = driver
        self._metrics = metrics
        self._prover = ServerProver(driver)
        self._expected: frozenset[str] = frozenset()

    def loading(self, has: str, gets: str) -> None:
        """The server is about to get a version.

        Args:
            has: tag that the server reports. A tag that this agent did not bring is of a server
                that was started anew: knowledge of the server before counts no more.
            gets: tag of the version.
        """
        if has not in self._expected:
            self._prover = ServerProver(self._driver)
        self._expected = frozenset((has, gets))

    def judge(self, version: Version, proof: Proof | None) -> None:
        """Compare the server with the version that the server reports, and tell the state.

        Args:
            proof: None: the version was saved without one.

        Raises:
            RefutedError, UnprovenError: the server is not to be ready.
            FellAsleepError: the server sleeps, and the state is told nothing.
        """
        started = time.monotonic()
        failpoint("agent.judging")
        found = self._compare(version, proof)
        failpoint("agent.judged")
        self._metrics.judged(found, time.monotonic() - started)
        self._shared.change(lambda state: state.judged(found))
        if found.verdict is Verdict.REFUTED:
            raise RefutedError(found.reason)
        if found.verdict is Verdict.UNPROVEN:
            raise UnprovenError(found.reason)

    def _compare(self, version: Version, proof: Proof | None) -> Judgement:
        tag = version.tag
        if proof is None:
            return Judgement(tag, Verdict.ABSENT)
        try:
            verdict = self._prover.prove(proof)
        except Exception as error:  # noqa: BLE001 - of a user's driver, too: nothing is proven
            if not isinstance(error, ServerError):
                _LOG.exception("the server could not be asked for its canaries")
            self._watch.look()
            self._check_awake()
            return Judgement(tag, Verdict.UNPROVEN, str(error) or type(error).__name__)
        if not self._watch.look():
            return Judgement(tag, Verdict.UNPROVEN, "the server could not be looked at again")
        self._check_awake()
        if (server := self._shared.state.server) != ReportedWeights(tag, paused=False):
            what = "none" if server is None else f"{server.tag!r}" + ", paused" * server.paused
            return Judgement(tag, Verdict.UNPROVEN, f"the server's weights are {what} by now")
        self._expected |= {tag}
        if isinstance(verdict, Proven):
            off = f"{verdict.typical:.3g} (median), {verdict.largest:.3g} (largest)"
            _LOG.info("version %s is proven: off by %s nats", tag, off)
            return Judgement(tag, Verdict.PROVEN, None, verdict.typical, verdict.largest)
        return Judgement(tag, Verdict.REFUTED, verdict.reason, None, verdict.off)

    def _check_awake(self) -> None:
        server = self._shared.state.server
        if server is not None and server.asleep:
            raise FellAsleepError("the server fell asleep before its weights were judged")
