"""An agent makes a server of a kind of its own follow a run, by its users' driver."""

import re
from collections.abc import Iterator

import pytest
import torch
from trainsync.agent.checks import AgentSettingsError
from trainsync.engines.servers.custom import DriverError

from tests.unit.agent.admission.test_proving import judged, proof_of
from tests.unit.agent.conftest import Start
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.own_server import SERVERS, OwnServer
from tests.unit.agent.runs import Run, weights_of
from tests.waiting import eventually

_HERE = "tests.unit.agent.own_server"


@pytest.fixture
def own(server: FakeServer) -> Iterator[OwnServer]:
    SERVERS[server.url] = made = OwnServer()
    yield made
    del SERVERS[server.url]


def test_a_server_with_a_driver_of_its_own_follows_a_run_and_is_proven(
    own: OwnServer, run: Run, start: Start
) -> None:
    agent = start("--engine=custom", f"--driver={_HERE}:OwnDriver", "--pause=wait")
    for step in (1, 2):
        run.commit(step, proof=proof_of(step))
        agent.until_ready_with(step)
        assert all(torch.equal(own.weights[n], t) for n, t in weights_of(step).items())
        assert agent.status["proof"]["verdict"] == "proven"
    assert own.pauses == {"wait"}
    run.commit(3, proof=proof_of(3, weights_of(4)))
    judged(agent, "refuted")
    assert not agent.ready


def test_errors_of_a_drivers_own_kinds_prove_nothing_and_the_server_is_loaded_anew(
    own: OwnServer, run: Run, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start("--engine=custom", f"--driver={_HERE}:OwnDriver")
    agent.until_ready_with(1)
    own.faulty = True
    found = agent.get("/prove").json()
    assert (found["verdict"], found["reason"]) == ("unproven", "'logprobs'")
    assert not agent.ready
    alive = agent.get("/server-healthz")
    assert (alive.status_code, alive.text) == (503, "no route to it\n")
    eventually(lambda: own.loads > 1, 60)
    own.faulty = False
    agent.until_ready_with(1)


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ("no.such.module:make", "cannot be imported: ModuleNotFoundError"),
        (f"{_HERE}:nothing", "cannot be imported: AttributeError"),
        (f"{_HERE}:refuse", "cannot be made: OSError('no such device')"),
        (f"{_HERE}:HalfADriver", "made a HalfADriver, which lacks close, tag, version"),
    ],
)
def test_a_driver_that_cannot_be_had_is_named(driver: str, message: str, start: Start) -> None:
    with pytest.raises(DriverError, match=re.escape(message)):
        start("--engine=custom", f"--driver={driver}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine=custom",), "--engine custom needs --driver"),
        (("--driver=a:b",), "--driver is given, expected --engine custom"),
        (("--engine=custom", "--driver=a.b"), "expected such as package.module:function"),
        (("--engine=custom", "--driver=a:b", "--prepare-seconds=1"), "custom prepares none"),
    ],
)
def test_a_driver_goes_with_a_custom_engine_alone(
    options: tuple[str, ...], message: str, start: Start
) -> None:
    with pytest.raises(AgentSettingsError, match=message):
        start(*options)
