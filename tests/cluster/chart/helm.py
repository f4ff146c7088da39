"""helm for the tests."""

import subprocess
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[3] / "charts" / "trainsync-operator"
FIXTURES = Path(__file__).parents[1] / "fixtures"
# The chart of the first released version, made by `helm package`.
PREVIOUS_CHART = FIXTURES / "trainsync-operator-previous.tgz"
EVERYTHING = FIXTURES / "everything.yaml"
KUBE_VERSION = "1.34.0"  # the server version of `helm template` without a cluster

Object = dict[str, Any]


class Helm:
    """One helm, for one cluster or for none. Every call has a deadline."""

    def __init__(self, program: Path, kubeconfig: str | None = None) -> None:
        self._words = [str(program), *([f"--kubeconfig={kubeconfig}"] if kubeconfig else [])]

    def run(self, *words: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command; its result may be a failure."""
        return subprocess.run(
            [*self._words, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def __call__(self, *words: str | Path, timeout: float = 60) -> str:
        """Run a command that must succeed; returns its output."""
        done = self.run(*words, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def template(self, *settings: str, values: Path | None = None) -> str:
        """The chart's manifests as release `x` in namespace `here`, without a cluster."""
        return self(*self._template(settings, values))

    def objects(self, *settings: str, values: Path | None = None) -> list[Object]:
        """`template` as parsed objects."""
        return [o for o in yaml.safe_load_all(self.template(*settings, values=values)) if o]

    def refusal(self, *settings: str) -> str:
        """helm's message for values that it must refuse."""
        done = self.run(*self._template(settings, None))
        assert done.returncode != 0, f"accepted: {settings}"
        return done.stderr

    @staticmethod
    def _template(settings: tuple[str, ...], values: Path | None) -> list[str | Path]:
        sets = [word for setting in settings for word in ("--set-json", setting)]
        files: list[str | Path] = ["--values", values] if values else []
        fixed = ["template", "x", CHART, f"--kube-version={KUBE_VERSION}", "--namespace=here"]
        return [*fixed, *files, *sets]


def only(objects: list[Object], kind: str, name: str = "") -> Object:
    """The only object of a kind, and of a name if given."""
    (found,) = [o for o in objects if o["kind"] == kind and name in ("", o["metadata"]["name"])]
    return found


def container(objects: list[Object]) -> Object:
    """The operator's container."""
    spec: Object = only(objects, "Deployment")["spec"]["template"]["spec"]
    (found,) = spec["containers"]
    return dict(found)
