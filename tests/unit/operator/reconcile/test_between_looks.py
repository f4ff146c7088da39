"""What happens between two looks of the operator, or between a look and its write, is not lost."""

from datetime import timedelta
from typing import Any

from trainsync.api.base import format_time
from trainsync.api.names import LABEL_ROLE
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.controller.queue import Backlog, WorkQueue
from trainsync_operator.controller.watch import Watches
from trainsync_operator.kube.kinds import CLAIM, DEPLOYMENT, POD, RUN
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile.reconcile import Reconciler
from trainsync_operator.reconcile.trimmed import trim

from tests.unit.operator.reconcile.hostile_watch import HostileWatch
from tests.unit.operator.reconcile.world import KEY, Ignore, World
from tests.unit.operator.support import spec


class Watched(World):
    """An operator whose store is fed by watches; its run trains."""

    def __init__(self) -> None:
        super().__init__()
        self.backlog: Backlog[Any] = Backlog(lambda wait: wait)
        store = Store(trim)
        queue = WorkQueue(self.backlog, lambda: 0.0)
        watches = Watches(self.api, store, queue.add, [None])  # type: ignore[arg-type]
        self.watch = HostileWatch(self.api, store, watches.told)
        self.operator = Reconciler(
            self.api, Ignore(), MonitorSettings("monitor:1"), self.clock, store=store
        )

    async def look(self) -> float | None:
        self.hear()
        again = await self.operator.reconcile(KEY)
        self.hear()
        return again

    def hear(self) -> None:
        self.watch.publish()
        self.watch.deliver()

    async def train(self) -> None:
        for _ in range(6):
            await self.look()
            self.kuberay.settle()
        await self.look()
        self.write(progress={"step": 9, "lastReportTime": format_time(self.clock.now)})
        for _ in range(2):
            await self.look()

    def write(self, **part: Any) -> None:
        """The monitor's part of the status."""
        run = self.api.run()
        run["status"] = {**run["status"], **part}
        self.api.put(RUN, run)

    def edit(self, **part: Any) -> None:
        """The user's."""
        run = self.api.run()
        run["spec"] = {**run["spec"], **part}
        run["metadata"]["generation"] += 1
        self.api.put(RUN, run)

    def answer(self, state: str) -> None:
        since = self.status["stopping"]["since"]
        self.write(checkpoint={"stopSave": {"since": since, "step": 9, "state": state}})


async def test_an_answer_that_comes_between_a_look_and_its_write_is_seen_at_once() -> None:
    world = Watched()
    await world.train()
    world.edit(suspend=True)
    await world.look()
    assert world.status["phase"] == "Suspending"
    world.answer("saving")
    world.hear()
    answers = ["committed"]

    def before(verb: str, *_: Any) -> None:
        if verb == "status" and answers:
            world.answer(answers.pop())
            world.watch.publish()

    world.api.before_write = before
    again = await world.operator.reconcile(KEY)
    assert answers == []
    assert again == 0.0
    await world.look()
    assert world.status["phase"] == "Suspended"


async def test_an_edit_while_the_run_saves_begins_an_attempt_when_it_goes_on_instead() -> None:
    world = Watched()
    await world.train()
    world.edit(suspend=True)
    await world.look()
    (cluster,) = world.api.run()["spec"]["clusters"]
    world.edit(clusters=[{**cluster, "image": "ray:2"}])
    await world.look()
    world.edit(suspend=False)
    for _ in range(5):
        await world.look()
        world.kuberay.settle()
    assert world.status["attempt"] == 1
    images = {pod["spec"]["containers"][0]["image"] for pod in world.api.all(POD)}
    assert images == {"ray:2"}


async def test_the_claim_of_a_finished_run_may_be_deleted_and_does_not_come_back() -> None:
    world = World(spec(checkpoint={"storage": {"volumeClaimTemplate": {"size": "1Gi"}}}))
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    assert world.status["phase"] == "Complete"
    (claim,) = world.api.all(CLAIM)
    claim["metadata"]["deletionTimestamp"] = format_time(world.clock.now)
    world.clock.now += timedelta(days=2)
    await world.calm()
    (monitor,) = world.api.all(DEPLOYMENT)
    assert monitor["spec"]["replicas"] == 0, "it is the monitor that uses the claim"
    world.api.remove(CLAIM, claim["metadata"]["name"])
    await world.calm()
    assert world.api.all(CLAIM) == []


async def test_counts_of_pods_that_come_up_are_written_together_and_by_the_look_that_is_due() -> (
    None
):
    world = Watched()
    await world.train()
    explorers = [
        pod for pod in world.api.all(POD) if pod["metadata"]["labels"].get(LABEL_ROLE) == "Explorer"
    ]
    world.clock.now += timedelta(seconds=60)

    def ready(pod: Any, truth: str) -> None:
        meta = {**pod["metadata"], "resourceVersion": world.api.next_version()}
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": truth}]}
        world.api.put(POD, {**pod, "metadata": meta, "status": status})

    def written() -> int:
        return world.status["clusters"][0]["readyWorkers"]

    whole = written()
    for pod in explorers:
        ready(pod, "False")
    await world.look()  # Ready is False from now on, which is no count
    assert written() == whole - len(explorers)
    ready(explorers[0], "True")
    again = await world.look()
    assert written() == whole - len(explorers)
    assert again is not None
    assert 0 < again <= 2
    world.clock.now += timedelta(seconds=again)
    await world.look()
    assert written() == whole - len(explorers) + 1
    for pod in explorers:
        ready(pod, "True")
    await world.look()
    assert written() == whole
