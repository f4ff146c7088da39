"""One run of the example with a killed trainer: install, apply, watch, kill, resume, check."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rich.console import Console
from trainsync.api import names

from demo import diagnose, faults
from demo.errors import DemoError, KubectlError
from demo.history import History
from demo.kubectl import Object
from demo.platform import Platform
from demo.promises import Promise, Verification, check
from demo.snapshot import snapshot_of
from demo.view import View

COMMITS_BEFORE_KILL = 3
_VERIFY_SECONDS = 120


@dataclass(frozen=True)
class Play:
    """One play on a cluster. ``release`` is the name of the operator's Helm release and
    namespace."""

    platform: Platform
    console: Console
    namespace: str
    release: str

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
        kubectl.apply(self.platform.fit(run), namespace=self.namespace)

    def _follow(self, name: str, view: View, seconds: float) -> History:
        history, kubectl = History(), self.platform.kubectl
        for run in kubectl.watch(names.PLURAL, name, self.namespace, seconds):
            snapshot = snapshot_of(run)
            history.tell(snapshot)
            view.show(snapshot)
            if snapshot.finished:
                return history
            if history.ready_to_kill(COMMITS_BEFORE_KILL):
                pod = faults.trainer_to_kill(kubectl, name, self.namespace)
                command = "bash -c 'kill -9 -1'"
                view.say(f"killing a trainer: kubectl -n {self.namespace} exec {pod} -- {command}")
                history.kill()
                faults.kill_pod_processes(kubectl, pod, self.namespace)
        raise DemoError(f"TrainingRun {self.namespace}/{name} was deleted before it finished")

    def _verify(self, name: str) -> Verification:
        """Verify the checkpoints on the volume, from the monitor's pod, which mounts the volume."""
        kubectl = self.platform.kubectl
        run = kubectl.get(names.PLURAL, name, self.namespace) or {}
        path = run.get("spec", {}).get("checkpoint", {}).get("path") or name
        directory = f"{names.CHECKPOINT_MOUNT}/{path}"
        words = ("trainsync", "checkpoints", "verify", directory, "--json")
        pod = f"deployment/{names.monitor_name(name)}"
        try:
            # The command fails if a checkpoint is damaged.
            text = kubectl.exec(pod, self.namespace, *words, timeout=_VERIFY_SECONDS)
        except KubectlError as error:
            return Verification(problem=str(error))
        saves = json.loads(text)["saves"]
        return Verification(tuple(save["step"] for save in saves if not save["problem"]))

    def _report(self, name: str) -> None:
        text = diagnose.report(self.platform.kubectl, name, self.namespace, self.release)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
