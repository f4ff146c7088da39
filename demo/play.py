"""One run of the example with killed trainers: install, apply, watch, kill, resume, check."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from rich.console import Console
from trainsync.api import names

from demo import diagnose, faults
from demo.bucket import Bucket
from demo.ending import last_words
from demo.errors import DemoError, KubectlError
from demo.history import Fault, History
from demo.kubectl import Object
from demo.platform import Platform
from demo.promises import Promise, Verification, check
from demo.snapshot import snapshot_of
from demo.times import show_times
from demo.view import View

COMMITS_BEFORE_KILL = 2
_VERIFY_SECONDS = 120


@dataclass(frozen=True)
class Play:
    """One play on a cluster. ``release`` is the name of the operator's Helm release and
    namespace; ``bucket`` takes the checkpoints in place of a volume."""

    platform: Platform
    console: Console
    namespace: str
    release: str
    bucket: Bucket | None = None

    def perform(self, run: Object, seconds: float) -> list[Promise]:
        """From the chart to the checked promises; the run may take ``seconds``. Raises DemoError.

        Prints diagnostics after a failure.
        """
        name = str(run["metadata"]["name"])
        with View(self.console) as view:
            self._apply(run, name, view)
            try:
                history = self._follow(name, view, seconds)
            except DemoError:
                self._report(name)
                raise
        self._show_times(name, history)
        promises = check(history, self._verify(name))
        if not all(promise.kept for promise in promises):
            self._report(name)
        return promises

    def _apply(self, run: Object, name: str, view: View) -> None:
        kubectl = self.platform.kubectl
        view.say(f"helm upgrade --install {self.release}: the operator, for {self.namespace}")
        self.platform.install_chart(self.release, [self.namespace])
        if kubectl.get(names.PLURAL, name, self.namespace):
            view.say(f"deleting the run {name} of an earlier time")
            kubectl.delete(names.PLURAL, name, self.namespace)
        view.say(f"kubectl -n {self.namespace} apply: TrainingRun {name}")
        if self.bucket is not None:
            view.say(f"its checkpoints go to {self.bucket.url(name)} at {self.bucket.endpoint}")
            kubectl.apply(self.bucket.secret_object(), namespace=self.namespace)
            run = self.bucket.fit(run)
        kubectl.apply(self.platform.fit(run), namespace=self.namespace)

    def _follow(self, name: str, view: View, seconds: float) -> History:
        history, kubectl = History(), self.platform.kubectl
        for run in kubectl.watch(names.PLURAL, name, self.namespace, seconds):
            snapshot = snapshot_of(run)
            history.tell(snapshot, time.monotonic())
            view.show(snapshot)
            if snapshot.finished:
                if snapshot.phase == "Complete" and not snapshot.told:
                    told = last_words(kubectl, name, self.namespace, snapshot)
                    history.tell(told, time.monotonic())
                return history
            fault = history.next_fault(COMMITS_BEFORE_KILL)
            if fault is not None:
                self._kill(fault, name, view, history)
        raise DemoError(f"TrainingRun {self.namespace}/{name} was deleted before it finished")

    def _kill(self, fault: Fault, name: str, view: View, history: History) -> None:
        kubectl = self.platform.kubectl
        pod = faults.trainer_to_kill(kubectl, name, self.namespace)
        shell = f"kubectl -n {self.namespace} exec {pod} -- bash -c"
        if fault is Fault.PROCESS:
            view.say(f"killing {fault.value}: {shell} 'kill -9 …'")
            history.kill(fault, time.monotonic())
            faults.kill_rank(kubectl, pod, self.namespace)
        else:
            view.say(f"killing {fault.value}: {shell} 'kill -9 -1'")
            history.kill(fault, time.monotonic())
            faults.kill_pod_processes(kubectl, pod, self.namespace)

    def _show_times(self, name: str, history: History) -> None:
        run = self.platform.kubectl.get(names.PLURAL, name, self.namespace)
        if run is None:
            raise DemoError(f"TrainingRun {self.namespace}/{name} was deleted after it finished")
        show_times(
            self.console, run, history, "the volume" if self.bucket is None else "the bucket"
        )

    def _verify(self, name: str) -> Verification:
        """Verify the checkpoints: those on the volume from the monitor's pod, which mounts it."""
        if self.bucket is not None:
            try:
                return verified(self.bucket.verify(name))
            except DemoError as error:
                return Verification(problem=str(error))
        kubectl = self.platform.kubectl
        run = kubectl.get(names.PLURAL, name, self.namespace) or {}
        path = run.get("spec", {}).get("checkpoint", {}).get("path") or name
        directory = f"{names.CHECKPOINT_MOUNT}/{path}"
        words = ("trainsync", "checkpoints", "verify", directory, "--json")
        pod = f"deployment/{names.monitor_name(name)}"
        try:
            # The command fails if a checkpoint is damaged.
            return verified(kubectl.exec(pod, self.namespace, *words, timeout=_VERIFY_SECONDS))
        except KubectlError as error:
            return Verification(problem=str(error))

    def _report(self, name: str) -> None:
        text = diagnose.report(self.platform.kubectl, name, self.namespace, self.release)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def verified(text: str) -> Verification:
    """What the JSON of `trainsync checkpoints verify` says."""
    saves = json.loads(text)["saves"]
    return Verification(tuple(save["step"] for save in saves if not save["problem"]))
