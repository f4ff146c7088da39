"""The demo from the first to the last line."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from trainsync.api import names

from demo import diagnose, faults
from demo.errors import DemoError, KubectlError
from demo.kubectl import Object
from demo.platform import REPOSITORY, Images, Platform, own_cluster, prepare
from demo.promises import Promise, Verification, check
from demo.snapshot import snapshot_of
from demo.story import Story
from demo.view import View
from devcluster.errors import DevclusterError
from devcluster.shell import Progress

MANIFEST = REPOSITORY / "examples" / "tiny_grpo" / "trainingrun.yaml"
NAMESPACE = "trainsync-demo"
COMMITS_BEFORE_KILL = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every promise was kept."""
    options = _parser().parse_args(argv)
    console = Console()
    start = time.monotonic()
    try:
        platform = prepare(os.environ.get("KUBECONFIG"), _images(options), Progress())
        run = load_run(options.manifest)
        promises = play(platform, run, console, options.timeout)
    except (DemoError, DevclusterError) as error:
        console.print(f"demo: {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted; the cluster stays up: `make cluster-down` removes it")
        return 130
    _summary(console, promises, time.monotonic() - start)
    _look_around(console, platform, str(run["metadata"]["name"]))
    return 0 if all(promise.kept for promise in promises) else 1


def load_run(path: Path) -> Object:
    """The TrainingRun of a manifest. Raises DemoError when there is not exactly one."""
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    runs = [document for document in documents if document.get("kind") == names.KIND]
    if len(runs) != 1:
        raise DemoError(f"{path} holds {len(runs)} TrainingRuns, expected exactly one")
    return dict(runs[0])


def play(platform: Platform, run: Object, console: Console, seconds: float) -> list[Promise]:
    """Install, apply, watch, kill, watch to the end, check."""
    kubectl, name = platform.kubectl, str(run["metadata"]["name"])
    with View(console) as view:
        view.say("installing the operator with its chart")
        platform.install_chart()
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        kubectl.apply(namespace, namespace=NAMESPACE)
        if kubectl.get(names.PLURAL, name, NAMESPACE):
            view.say(f"deleting the run {name} of an earlier demo")
            kubectl.delete(names.PLURAL, name, NAMESPACE)
        view.say(f"kubectl -n {NAMESPACE} apply: TrainingRun {name}")
        kubectl.apply(platform.fit(run), namespace=NAMESPACE)
        try:
            story = _follow(platform, name, view, seconds)
        except DemoError:
            console.print(diagnose.report(kubectl, name, NAMESPACE), markup=False)
            raise
    verified = _verify(platform, name)
    promises = check(story, verified)
    if not all(promise.kept for promise in promises):
        console.print(diagnose.report(kubectl, name, NAMESPACE), markup=False)
    return promises


def _follow(platform: Platform, name: str, view: View, seconds: float) -> Story:
    story = Story()
    kubectl = platform.kubectl
    for run in kubectl.watch(names.PLURAL, name, NAMESPACE, seconds):
        snapshot = snapshot_of(run)
        story.tell(snapshot)
        view.show(snapshot)
        if snapshot.finished:
            return story
        if story.ready_to_kill(COMMITS_BEFORE_KILL):
            pod = faults.trainer_to_kill(kubectl, name, NAMESPACE)
            command = " ".join(faults.KILL_ALL[:2]) + f" '{faults.KILL_ALL[2]}'"
            view.say(f"killing a trainer: kubectl -n {NAMESPACE} exec {pod} -- {command}")
            story.kill()
            faults.kill_pod_processes(kubectl, pod, NAMESPACE)
    raise DemoError(f"TrainingRun {NAMESPACE}/{name} was deleted before it finished")


def _verify(platform: Platform, name: str) -> Verification:
    """Verify what is on the volume, from the monitor's pod, which has it mounted."""
    kubectl = platform.kubectl
    run = kubectl.get(names.PLURAL, name, NAMESPACE) or {}
    path = run.get("spec", {}).get("checkpoint", {}).get("path") or name
    words = ("trainsync", "checkpoints", "verify", f"{names.CHECKPOINT_MOUNT}/{path}")
    try:
        output = kubectl.exec(
            f"deployment/{names.monitor_name(name)}", NAMESPACE, *words, timeout=120
        )
    except KubectlError as error:
        return Verification(False, str(error))
    return Verification(True, output)


def _summary(console: Console, promises: list[Promise], seconds: float) -> None:
    table = Table("", "promise", "seen", title="What was promised", show_lines=True)
    for promise in promises:
        mark = "[green]kept[/]" if promise.kept else "[bold red]BROKEN[/]"
        table.add_row(mark, promise.text, promise.seen)
    console.print(table)
    kept = sum(promise.kept for promise in promises)
    console.print(f"{kept} of {len(promises)} promises kept, after {seconds:.0f} s in all.")


def _look_around(console: Console, platform: Platform, name: str) -> None:
    kubectl = f"{platform.kubectl.program} -n {NAMESPACE}"
    lines = [
        "",
        "Look around (the cluster stays up):",
        f"  export KUBECONFIG={platform.kubectl.kubeconfig}",
        f"  {kubectl} get trainingrun {name} -o wide",
        f"  {kubectl} describe trainingrun {name}",
        "The dashboard of Ray on http://localhost:8265, until the run's clusters are taken down:",
        f"  {kubectl} port-forward $({kubectl} get svc -o name | grep head-svc | tail -1) 8265",
        "The monitor's metrics on http://localhost:8080/metrics:",
        f"  {kubectl} port-forward deployment/{names.monitor_name(name)} 8080",
        "Remove the run, and all it made:",
        f"  {kubectl} delete trainingrun {name}",
    ]
    if not own_cluster(os.environ.get("KUBECONFIG")):
        lines += ["Remove the cluster: make cluster-down"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _images(options: argparse.Namespace) -> Images | None:
    given = (options.operator_image, options.monitor_image, options.ray_image)
    if not any(given):
        return None
    if not all(given):
        raise DemoError("give all of --operator-image, --monitor-image and --ray-image, or none")
    return Images(*given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="A TrainingRun on a real cluster, with a killed trainer and checked promises.",
        epilog="With KUBECONFIG, your cluster (with KubeRay) and images that it can pull.",
    )
    parser.add_argument("--manifest", type=Path, default=MANIFEST, help="the TrainingRun")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the run (600)")
    parser.add_argument("--operator-image", help="for a cluster of yours: repository:tag")
    parser.add_argument("--monitor-image", help="for a cluster of yours: repository:tag")
    parser.add_argument("--ray-image", help="for a cluster of yours: repository:tag")
    return parser


if __name__ == "__main__":
    sys.exit(main())
