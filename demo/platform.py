"""The demo's cluster: the development cluster with images of this tree, or the user's cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.adapt import Object, for_devcluster, with_image
from demo.errors import DemoError
from demo.kubectl import Kubectl
from devcluster import lifecycle
from devcluster.paths import STATE_ROOT
from devcluster.shell import Progress
from devcluster.tools import ensure_tools
from images.build import RECIPES, archive_path, build_all
from images.pod_env import MOUNT_PATH, pod_env

REPOSITORY = Path(__file__).resolve().parent.parent
CHART = REPOSITORY / "charts" / "trainsync-operator"
# The first `up` builds Kubernetes from source.
_CLUSTER_SECONDS = 2400
_LOAD_SECONDS = 600
_HELM_SECONDS = 180


@dataclass(frozen=True)
class Images:
    """Full image names with tags."""

    operator: str
    monitor: str
    ray: str


@dataclass(frozen=True)
class Platform:
    """A cluster on which TrainingRuns can be applied, once the chart is installed."""

    kubectl: Kubectl
    helm: Path
    images: Images
    environment: Path | None
    """Folder with the Ray pods' Python packages; None if the image has all packages."""

    def fit(self, run: Object) -> Object:
        """A TrainingRun adapted to this cluster."""
        if self.environment is None:
            return with_image(run, self.images.ray)
        return for_devcluster(run, self.images.ray, self.environment, MOUNT_PATH)

    def install_chart(
        self, release: str, namespaces: Sequence[str], *settings: str, chart: Path = CHART
    ) -> None:
        """Install or upgrade an operator for some namespaces and wait until it is ready.

        The operator runs in namespace ``release``. Its only permissions are Roles in ``namespaces``
        (which are made), so other operators on the cluster are not affected. Raises DemoError.
        """
        for name in namespaces:
            self.make_namespace(name)
        images = {"image": self.images.operator, "monitorImage": self.images.monitor}
        # As strings: helm would turn a tag of digits into a number.
        values = [pair for key, image in images.items() for pair in _image_values(key, image)]
        self.run_helm(
            *("upgrade", "--install", release, str(chart)),
            *("--namespace", release, "--create-namespace"),
            # Another release or `kubectl apply` may have made the CRD.
            "--take-ownership",
            *("--wait", f"--timeout={_HELM_SECONDS}s"),
            *(word for value in values for word in ("--set-string", value)),
            *("--set", f"watchNamespaces={{{','.join(namespaces)}}}"),
            *(word for value in settings for word in ("--set", value)),
        )

    def make_namespace(self, name: str) -> None:
        """Make a namespace if it does not exist."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.kubectl.apply(body, namespace=name)

    def run_helm(self, *words: str, timeout: float = _HELM_SECONDS + 20) -> str:
        """Run helm and return its stdout. Raises DemoError with the end of its output."""
        argv = [str(self.helm), f"--kubeconfig={self.kubectl.kubeconfig}", *words]
        shown = "helm " + " ".join(words[:4])
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"`{shown}` did not end within {timeout:.0f} s") from error
        if done.returncode != 0:
            raise DemoError(f"`{shown}` failed: {(done.stderr + done.stdout).strip()[-2000:]}")
        return done.stdout


def own_cluster(kubeconfig: str | None) -> bool:
    """Whether ``$KUBECONFIG`` names a cluster that is not a devcluster of this machine."""
    if not kubeconfig:
        return False
    return not Path(kubeconfig).resolve().is_relative_to(STATE_ROOT)


def devcluster_name(kubeconfig: str | None) -> str:
    """The devcluster of a ``$KUBECONFIG`` that is not an own cluster's."""
    if not kubeconfig:
        return "dev"
    return Path(kubeconfig).resolve().relative_to(STATE_ROOT).parts[0]


def prepare(kubeconfig: str | None, images: Images | None, progress: Progress) -> Platform:
    """Start a devcluster with its images, or use the cluster and images named by the user.

    Raises DemoError, DevclusterError.
    """
    if own_cluster(kubeconfig):
        if images is None:
            raise DemoError(
                "KUBECONFIG names a cluster of yours, so name the images that it can pull:"
                " --operator-image, --monitor-image and --ray-image (see images/README.md)"
            )
        path = Path(str(kubeconfig))
        if not path.is_file():
            raise DemoError(f"KUBECONFIG is {kubeconfig!r}, expected the path of one file")
        kubectl = Kubectl(_program("kubectl"), path)
        return Platform(kubectl, _program("helm"), images, environment=None)
    if images is not None:
        raise DemoError(
            "--operator-image and the like are for a cluster of yours: set KUBECONFIG too,"
            " or leave them out"
        )
    return devcluster_platform(progress, devcluster_name(kubeconfig))


def devcluster_platform(progress: Progress, name: str = "dev") -> Platform:
    """A development cluster, up, with this tree's images loaded."""
    _run_visibly([*_devcluster(name), "up"], _CLUSTER_SECONDS)
    tags = build_all(list(RECIPES), progress)
    images = Images(tags["operator"], tags["monitor"], tags["ray-devcluster"])
    environment = pod_env(progress)
    load_images(images, name)
    tools = ensure_tools(progress)
    kubeconfig = lifecycle.require_record(name).cluster.kubeconfig
    kubectl = Kubectl(tools.path("kubectl"), kubeconfig)
    return Platform(kubectl, tools.path("helm"), images, environment)


def load_images(images: Images, name: str = "dev") -> None:
    """Load packed images into every node of a development cluster that lacks them."""
    archives = [str(archive_path(tag)) for tag in (images.operator, images.monitor, images.ray)]
    _run_visibly([*_devcluster(name), "load-image", *archives], _LOAD_SECONDS)


def _devcluster(name: str) -> list[str]:
    return [sys.executable, "-m", "devcluster", "--name", name]


def _image_values(key: str, image: str) -> list[str]:
    repository, _, tag = image.rpartition(":")
    if not repository or "/" in tag:
        raise DemoError(f"image {image!r} has no tag: write it as repository:tag")
    return [f"{key}.repository={repository}", f"{key}.tag={tag}"]


def _program(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise DemoError(f"`{name}` is not in PATH; it is needed for a cluster of yours")
    return Path(found)


def _run_visibly(argv: list[str], seconds: float) -> None:
    """Run a program and show its progress lines; raise DemoError when it fails."""
    shown = " ".join(["python3", *argv[1:7]])
    try:
        code = subprocess.run(argv, timeout=seconds, check=False, cwd=REPOSITORY).returncode
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"`{shown}` did not end within {seconds:.0f} s") from error
    if code != 0:
        raise DemoError(f"`{shown}` failed with exit code {code}; its last lines are above")
