"""Writers and monitors of a run in a bucket, killed at a request."""

import signal
from dataclasses import replace
from typing import Final

from trainsync.api.protocol import SaveState

from tests.faults.in_bucket.processes import PART_BYTES
from tests.faults.in_bucket.proxying import Between, Breach
from tests.faults.in_bucket.scene import Scene, draw_plan, scene
from tests.faults.kube import FileApi, Place, write_token
from tests.faults.plan import Plan
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.trial import Trial
from tests.store.servers.fault_proxy import Fault
from tests.unit.monitor.fakes import UID

_WHEN: Final = {
    "before": Fault.CUT,
    "amid": Fault.HALF_SENT,
    "served": Fault.LOST_REPLY,
}
REQUESTS: Final = {
    "shard": ("PUT", r"/objects/"),
    "part": ("PUT", r"partNumber="),
    "complete": ("POST", r"uploadId="),
    "record": ("PUT", r"/run/saves/"),
    "pin": ("PUT", r"/pins/"),
    "term": ("PUT", r"/run/TERM\.json"),
    "manifest": ("PUT", r"/manifests/"),  # each second one; the one before is of a mark
    "mark": ("PUT", r"/manifests/"),
    "pointer": ("PUT", r"/latest_checkpointed"),
    "receipt": ("PUT", r"/receipts/"),
    "outcome": ("PUT", r"/OUTCOME\.json"),
    "put": ("PUT", ""),
    "get": ("GET", r"^[^?]*(\?|$)(?!.*list-type)"),
    "list": ("GET", r"list-type"),
    "delete": ("POST", r"\?delete"),
}
LARGE: Final = PART_BYTES // 4 + 100_000
"""Elements of a state that goes in two parts."""


def enlarged(plan: Plan) -> Plan:
    """The plan with few states, each of which goes in two parts."""
    return replace(
        plan, ranks=min(plan.ranks, 2), components=plan.components[:1], least=LARGE, largest=LARGE
    )


def _breach(trial: Trial, client: str, most: int) -> Breach:
    when, _, what = trial.point.partition("/")
    method, pattern = REQUESTS[what]
    after = trial.dice.randrange(most)
    return Breach(client, _WHEN[when], method, pattern, kills=True, more={"after": after})


def _writer_killed(trial: Trial) -> None:
    large = trial.point.endswith(("/part", "/complete"))
    plan = draw_plan(trial.seed, split=True)
    if large:
        plan = enlarged(plan)
    most = len(plan.components)
    if trial.point.endswith("/pin"):
        plan, most = replace(plan, frozen=plan.components), 1
    breach = _breach(trial, "ranks", most)
    with scene(trial, plan, Between([breach])) as made:
        host, ranks = made.start()
        assert ranks is not None
        made.arm()
        for child in (host, ranks):
            child.tell("fault")
        ended, status = ranks.listen()
        if (ended, status) != ("ended", -signal.SIGKILL):
            if made.quiet():
                raise BrokenError(f"the writer was not killed: it says {ended!r}, {status}")
            ranks.kill()
        host.expect("saved")
        if trial.dice.random() < 0.5:
            host.kill()
        else:
            made.end(host)
        made.check_resumes()


def _monitor_killed(trial: Trial) -> None:
    what = trial.point.partition("/")[2]
    plan = draw_plan(trial.seed, split=trial.dice.random() < 0.5)
    if what == "delete":
        plan = plan.keeping(1)
    saves = len(plan.history) + 1
    most = {"put": 8 * saves, "get": 9 * saves, "list": 4 * saves}
    most |= {"term": 2 * saves, "manifest": 2 * saves}
    breach = _breach(trial, "host", most.get(what, saves))
    with scene(trial, plan, Between([breach])) as made:
        _until_killed(made)
        made.check_resumes()


def _until_killed(made: Scene) -> None:
    """The job from its claim on, until the monitor's process is killed; if it is not by the end of
    the fault's step it is killed then."""
    here, there = made.split()
    made.arm()
    host = made.start_host(here)
    ranks = None
    for word in ("claimed", "history", "saved", "outcomes"):
        said, value = host.listen()
        if said == "ended":
            if value != -signal.SIGKILL:
                raise BrokenError(f"the monitor's process ended with {value}")
            break
        if said != word:
            raise BrokenError(f"the monitor's process said {said!r}: {value}")
        if word == "claimed" and there:
            ranks = made.start_ranks(there)
        if word == "history":
            host.tell("fault")
            if ranks is not None:
                ranks.tell("fault")
        if word == "saved" and made.trial.dice.random() < 0.2:
            break
        if word == "saved":
            host.tell("outcomes")
    host.kill()
    if ranks is not None:
        ranks.kill()


def _monitor_followed(trial: Trial) -> None:
    """Two pods of monitors; the one that has the Lease is killed."""
    what = trial.point.partition("/")[2]
    plan = draw_plan(trial.seed)
    if what == "delete":
        plan = plan.keeping(1)
    early = trial.dice.random() < 0.3  # from the monitor's start on
    saves = 1 + early * len(plan.history)
    most = {"put": 6 * saves, "get": 7 * saves, "list": 3 * saves, "term": saves}
    most |= {"manifest": 2 * saves}
    breach = _breach(trial, "host", most.get(what, saves))
    trial.uid = UID
    with scene(trial, plan, Between([breach])) as made:
        api = trial.directory / "api"
        FileApi.create(api)
        places = [Place.choose("monitor-a"), Place.choose("monitor-b")]
        if early:
            made.arm()
        first = made.serve("host", places[0], api)
        if not early:
            places[0].wait_ready(trial.watch.look)
        second = made.serve("next", places[1], api)
        job = made.start_served(places, write_token(trial.directory))
        for word in ("claimed", "history"):
            job.expect(word)
        if not early:
            made.arm()
        job.tell("fault")
        failed = job.expect("saved")
        if trial.dice.random() < 0.2:
            first.kill()
        job.tell("outcomes")
        outcomes = job.expect("outcomes")
        first.kill()
        for status in outcomes.values():
            if status.state is not SaveState.COMMITTED:
                raise BrokenError(f"step {status.step} is {status.state}: {status.error}, {failed}")
        job.tell("after")
        job.expect("after")
        made.check()
        for child in (job, second):
            child.kill()
        made.check_resumes()


SCENARIOS = (
    Scenario(
        name="bucket_writer_killed",
        broken="kill -9 of a writer at a request of a save into a bucket",
        holds="the save commits if every receipt was put, else nothing of it; orphans go",
        points=(
            "before/shard", "amid/shard", "served/shard",
            "before/record", "amid/record", "served/record",
            "before/part", "served/part", "before/complete", "served/complete",
            "before/get", "served/get", "before/pin", "served/pin",
        ),
        trial=_writer_killed,
    ),
    Scenario(
        name="bucket_monitor_killed",
        broken="kill -9 of the monitor at a request from its claim on",
        holds="the next attempt finishes what was complete; orphans go",
        points=(
            "before/put", "amid/put", "served/put",
            "before/term", "served/term", "before/manifest", "served/manifest",
            "before/pointer", "served/pointer", "before/record", "served/record",
            "before/get", "served/get", "before/list", "served/list",
            "before/delete", "served/delete",
        ),
        trial=_monitor_killed,
    ),
    Scenario(
        name="bucket_monitor_followed",
        broken="kill -9 of a monitor's pod at a request, while the trainer lives",
        holds="the next monitor commits every save of the same attempt",
        points=(
            "before/put", "amid/put", "served/put", "before/term", "served/term",
            "before/manifest", "served/manifest", "before/pointer", "served/pointer",
            "before/outcome", "served/outcome", "before/get", "served/get",
            "before/list", "served/list", "before/delete", "served/delete",
        ),
        trial=_monitor_followed,
    ),
)  # fmt: skip
