"""Prove that a server has the version that it says: between its update and its admission."""

from dataclasses import dataclass

from trainsync.engines.servers.base import ServerDriver
from trainsync.engines.servers.errors import ServerError
from trainsync.weights.proof.comparing import Logprobs, Proven, Refuted, Verdict, compare
from trainsync.weights.proof.record import Proof


@dataclass(frozen=True)
class _Last:
    """The observations of the last proof of a version."""

    proof: Proof
    said: Logprobs | None


class ServerProver:
    """Knows one server process, from version to version. One thread.

    Make a new one when the server is started anew. Answers of the version before let it see a
    server that has not, or not wholly, taken a step.

    Args:
        serves: the proof of the version that the server is known to serve, where an earlier
            process proved it; None: unknown.
    """

    def __init__(self, driver: ServerDriver, serves: Proof | None = None) -> None:
        self._driver = driver
        self._last = None if serves is None else _Last(serves, None)

    def prove(self, proof: Proof) -> Verdict:
        """Ask the server for its canaries, and compare.

        Call it after `ServerDriver.update`, which has resumed the server, and before the server is
        ready: no request of others reaches it then.

        Args:
            proof: of the version that the server was updated to.

        Raises:
            ServerError: it is paused, or gave no answer in time. Nothing is proven then.
        """
        if self._driver.is_paused():
            raise ServerError("the server is paused, and answers nothing: resume it first")
        said = self._driver.logprobs(proof.canaries)
        has = self._driver.version()
        if has != proof.weight_version:
            return Refuted(f"the server says that it has version {has}")
        last = self._last
        if last is not None and last.proof.weight_version == has:
            last = None  # the same version again: no step to compare with
        verdict = compare(
            proof,
            said,
            before=None if last is None else last.proof,
            said_before=None if last is None else last.said,
        )
        if isinstance(verdict, Proven):
            self._last = _Last(proof, said)
        return verdict
