"""The demo's command line."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from trainsync.api import names

from demo.bucket import serving
from demo.errors import DemoError
from demo.kubectl import Object
from demo.platform import REPOSITORY, Images, Platform, own_cluster, prepare
from demo.play import Play
from demo.promises import Promise
from devcluster.errors import DevclusterError
from devcluster.shell import Progress

MANIFEST = REPOSITORY / "examples" / "tiny_grpo" / "trainingrun.yaml"
NAMESPACE = "trainsync-demo"
RELEASE = "trainsync-operator"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every promise was kept."""
    options = _parser().parse_args(argv)
    console = Console()
    start = time.monotonic()
    try:
        platform = prepare(os.environ.get("KUBECONFIG"), _images(options), Progress())
        run = load_run(options.manifest)
        with serving() if options.store == "s3" else nullcontext() as bucket:
            play = Play(platform, console, NAMESPACE, RELEASE, bucket)
            promises = play.perform(run, options.timeout)
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


def _summary(console: Console, promises: list[Promise], seconds: float) -> None:
    table = Table("", "promise", "seen", title="What was promised", show_lines=True)
    for promise in promises:
        mark = "[green]kept[/]" if promise.kept else "[bold red]BROKEN[/]"
        table.add_row(mark, promise.text, promise.seen)
    console.print(table)
    kept = sum(promise.kept for promise in promises)
    console.print(f"{kept} of {len(promises)} promises kept, after {seconds:.0f} s in all.")


def _look_around(console: Console, platform: Platform, name: str) -> None:
    cluster = platform.kubectl
    path = "" if shutil.which("kubectl") else f" PATH={cluster.program.parent}:$PATH"
    lines = [
        "",
        "Look around (the cluster stays up):",
        f"  export KUBECONFIG={cluster.kubeconfig}{path}",
        f"  kubectl config set-context --current --namespace {NAMESPACE}",
        f"  kubectl get trainingrun {name} -o wide",
        f"  kubectl describe trainingrun {name}",
        "Ray's dashboard on http://localhost:8265, until the run's clusters are taken down:",
        "  kubectl port-forward $(kubectl get svc -o name | grep head-svc | tail -1) 8265",
        "The monitor's metrics on http://localhost:8080/metrics:",
        f"  kubectl port-forward deployment/{names.monitor_name(name)} 8080",
        "Remove the run, and all it made:",
        f"  kubectl delete trainingrun {name}",
    ]
    if not own_cluster(os.environ.get("KUBECONFIG")):
        lines += ["Remove the cluster:", "  make cluster-down"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _images(options: argparse.Namespace) -> Images | None:
    given = (options.operator_image, options.monitor_image, options.ray_image)
    if not any(given):
        return None
    if not all(given):
        raise DemoError(
            "give all of --operator-image, --monitor-image and --ray-image (or OPERATOR_IMAGE,"
            " MONITOR_IMAGE and RAY_IMAGE in the environment), or none"
        )
    return Images(*given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="A TrainingRun on a real cluster, with a killed trainer and checked promises.",
        epilog="With KUBECONFIG, your cluster (with KubeRay) and images that it can pull.",
    )
    parser.add_argument("--manifest", type=Path, default=MANIFEST, help="the TrainingRun")
    parser.add_argument(
        "--store",
        choices=("volume", "s3"),
        default="volume",
        help="where checkpoints go: the manifest's volume (the default), or, with no volume at "
        "all, a bucket of an S3 server that runs on this machine for the time of the demo",
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the run (600)")
    _image_option(parser, "--operator-image", "OPERATOR_IMAGE")
    _image_option(parser, "--monitor-image", "MONITOR_IMAGE")
    _image_option(parser, "--ray-image", "RAY_IMAGE")
    return parser


def _image_option(parser: argparse.ArgumentParser, option: str, variable: str) -> None:
    parser.add_argument(
        option,
        default=os.environ.get(variable),
        help=f"for a cluster of yours: repository:tag (or {variable} in the environment)",
    )


if __name__ == "__main__":
    sys.exit(main())
