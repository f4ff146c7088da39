"""One trial's API server, monitor processes and job over HTTP."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults.failover import FailoverClient, client_of
from tests.faults.kube import CLUSTER, FileApi, Place, serve, write_token
from tests.faults.obeying import Faulty, obey
from tests.faults.plan import Plan
from tests.faults.processes import Child, Line
from tests.faults.training import Trainer, Where
from tests.faults.trial import Trial
from tests.unit.monitor.fakes import UID


def _ranks(
    line: Line, where: Where, plan: Plan, places: Sequence[Place], token: Path, faulty: Faulty
) -> None:
    """A whole job, which asks whichever monitor is ready."""
    faulty.build_in()
    client = FailoverClient([client_of(place, where, token) for place in places])
    client.claim(CLUSTER)
    trainer = Trainer(where, plan, client, range(plan.ranks))  # type: ignore[arg-type]
    obey(line, trainer, faulty)


class Cluster:
    """The API server's files and the monitor processes of one trial."""

    def __init__(self, trial: Trial, plan: Plan) -> None:
        self._trial = trial
        self._plan = plan
        trial.uid = UID
        self._directory = trial.directory / "api"
        self.api = FileApi.create(self._directory)
        self.token = write_token(trial.directory)
        self.where = trial.attempt(plan)

    def monitor(self, place: Place, phase: Callable[[str], None] = lambda _: None) -> Child:
        """A monitor process; the first one that is ready holds the Lease."""
        return self._trial.child(
            place.identity, serve, place, self.where, self._plan, self._directory, phase
        )

    def job(self, places: Sequence[Place], faulty: Faulty | None = None) -> Child:
        """The first attempt, with its history committed."""
        child = self._trial.child(
            "job", _ranks, self.where, self._plan, places, self.token, faulty or Faulty()
        )
        child.expect("history")
        return child
