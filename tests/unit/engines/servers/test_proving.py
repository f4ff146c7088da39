"""Between its update and its admission a server is proven, or the reason is known."""

from collections.abc import Mapping, Sequence

import pytest
from trainsync.engines.servers.base import Update
from trainsync.engines.servers.errors import ServerError
from trainsync.engines.servers.proving import ServerProver
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.comparing import Proven, Refuted
from trainsync.weights.proof.record import Proof, Tolerance
from trainsync.weights.staging.index import StagedReference

_CANARIES = make_canaries(50, count=10, length=5)


def _rows(version: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(-1 - version * 0.001 for _ in row[1:]) for row in _CANARIES)


def _proof(version: int) -> Proof:
    limits = Tolerance(0.05, 0.05, 0.05)
    return Proof(version, "float32", _CANARIES, _rows(version), limits)


class Driver:
    """Says what a test wants."""

    def __init__(self) -> None:
        self.has: int | None = None
        self.answers = 0
        self.paused = False
        self.digests: dict[str, str] = {}

    def serve(self, version: int) -> None:
        self.has = self.answers = version

    def version(self) -> int | None:
        return self.has

    def is_paused(self) -> bool:
        return self.paused

    def update(self, version: int, staged: StagedReference) -> Update:
        raise NotImplementedError

    def checksums(self) -> Mapping[str, str]:
        return self.digests

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        assert not self.paused
        return _rows(self.answers)


def test_each_version_is_proven_and_a_stale_one_refuted_until_it_is_there() -> None:
    driver = Driver()
    prover = ServerProver(driver)
    for version in (1, 2):
        driver.serve(version)
        assert isinstance(prover.prove(_proof(version)), Proven)
    driver.has = 3
    stale = prover.prove(_proof(3))
    assert isinstance(stale, Refuted)
    assert "exactly as with version 2" in stale.reason
    driver.serve(3)
    assert isinstance(prover.prove(_proof(3)), Proven)
    assert isinstance(prover.prove(_proof(3)), Proven)


def test_a_server_that_names_another_version_is_refuted() -> None:
    driver = Driver()
    driver.serve(1)
    assert ServerProver(driver).prove(_proof(2)) == Refuted("the server says that it has version 1")


def test_a_paused_server_is_not_asked() -> None:
    driver = Driver()
    driver.paused = True
    with pytest.raises(ServerError, match="is paused"):
        ServerProver(driver).prove(_proof(1))
