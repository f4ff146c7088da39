"""Go programs, built once from pinned modules into a cache outside the checkout.

Each directory below ``devcluster/tools`` is one Go module, so that the programs' dependencies do
not pull on each other. What is built lands in ``<cache>/tools/<module>-<hash of the module's
files>/``; a directory ``all-<hash>`` of links holds the programs of all modules.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.shell import Progress, run, sync_directory

_MODULES = Path(__file__).parent / "tools"
_KUBERNETES = "v1.34.4"
_VERSION = "k8s.io/component-base/version"
_KUBERNETES_LDFLAGS = " ".join(
    # Without these /version is a placeholder that breaks clients.
    f"-X {_VERSION}.{name}={value}"
    for name, value in {
        "gitVersion": _KUBERNETES,
        "gitMajor": "1",
        "gitMinor": _KUBERNETES.split(".")[1],
        "gitCommit": _KUBERNETES,
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
    }.items()
)


@dataclass(frozen=True)
class Program:
    """One program of a Go module."""

    name: str
    module: str
    """Directory below ``devcluster/tools``."""
    package: str
    minutes: str
    """How long a cold build takes on two cores, for the person who waits."""
    ldflags: str = ""


def _kubernetes(name: str, minutes: str) -> Program:
    return Program(
        name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", minutes, _KUBERNETES_LDFLAGS
    )


PROGRAMS = (
    _kubernetes("kube-apiserver", "~4 min"),
    _kubernetes("kubelet", "~1 min"),
    _kubernetes("kube-controller-manager", "~30 s"),
    _kubernetes("kube-scheduler", "~10 s"),
    _kubernetes("kube-proxy", "~10 s"),
    _kubernetes("kubectl", "~30 s"),
    Program("etcd", "etcd", "go.etcd.io/etcd/server/v3", "~30 s"),
    Program("kuberay-operator", "kuberay", "github.com/ray-project/kuberay/ray-operator", "~90 s"),
    Program("coredns", "coredns", "github.com/coredns/coredns", "~100 s"),
    Program("helm", "helm", "helm.sh/helm/v3/cmd/helm", "~1 min"),
    Program("pause", "pause", ".", "~5 s"),
)

_KUBERAY_MODULE = "github.com/ray-project/kuberay/ray-operator"
KUBERAY_CONFIG = "kuberay-config"
"""KubeRay's own kustomize manifests, taken from its module."""


@dataclass(frozen=True)
class Tools:
    """The built programs."""

    directory: Path
    """Holds every program by its name, and KubeRay's manifests."""
    key: str
    """Changes when any of the programs does."""

    def path(self, name: str) -> Path:
        return self.directory / name


def cache_root() -> Path:
    """Where trainsync keeps what is expensive to make, outside any checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trainsync"


def tools_key() -> str:
    """What the programs are made from, as one hash; needs nothing built."""
    return _key(_module_hashes())


def _module_hashes() -> dict[str, str]:
    modules = {program.module for program in PROGRAMS}
    return {module: module_hash(_MODULES / module) for module in modules}


def _key(hashes: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:12]


def ensure_tools(progress: Progress) -> Tools:
    """Build what is not in the cache yet, one program after another.

    Raises DevclusterError when Go is missing or a build fails.
    """
    hashes = _module_hashes()
    key = _key(hashes)
    root = cache_root() / "tools"
    together = root / f"all-{key}"
    if together.is_dir():
        return Tools(together, key)
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / ".lock", progress):
        homes = {module: root / f"{module}-{hashes[module]}" for module in hashes}
        missing = [
            program for program in PROGRAMS if not (homes[program.module] / program.name).exists()
        ]
        if missing and shutil.which("go") is None:
            raise DevclusterError(
                "`go` is not in PATH: Go 1.26 or newer is needed to build the cluster's programs"
            )
        for number, program in enumerate(missing, 1):
            progress.say(
                f"building {program.name} {number}/{len(missing)}, "
                f"may take {program.minutes} the first time"
            )
            _build(program, homes[program.module])
        config = homes["kuberay"] / KUBERAY_CONFIG
        if not config.is_dir():
            _copy_kuberay_config(config)
        _link_together(together, homes)
    return Tools(together, key)


def module_hash(module: Path) -> str:
    """Hash over names and contents of a module's files (go.mod, go.sum, own sources)."""
    digest = hashlib.sha256()
    for file in sorted(path for path in module.iterdir() if path.is_file()):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    digest.update("".join(p.ldflags for p in PROGRAMS if p.module == module.name).encode())
    return digest.hexdigest()[:12]


def _go_env() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"}


def _build(program: Program, home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=home) as scratch:
        built = Path(scratch) / program.name
        ldflags = f"-s -w {program.ldflags}".strip()
        run(
            ["go", "build", "-trimpath", "-ldflags", ldflags, "-o", built, program.package],
            cwd=_MODULES / program.module,
            env=_go_env(),
            timeout=3600,
        )
        built.rename(home / program.name)
    sync_directory(home)


def _copy_kuberay_config(config: Path) -> None:
    downloaded = run(
        ["go", "mod", "download", "-json", _KUBERAY_MODULE],
        cwd=_MODULES / "kuberay",
        env=_go_env(),
        timeout=300,
    )
    source = Path(json.loads(downloaded)["Dir"])
    with tempfile.TemporaryDirectory(prefix=".config-", dir=config.parent) as scratch:
        copy = Path(scratch) / KUBERAY_CONFIG
        for part in ("crd", "rbac", "manager", "default"):
            # copyfile: the module cache is read-only, and a copy of its modes could not be removed.
            shutil.copytree(source / "config" / part, copy / part, copy_function=shutil.copyfile)
        for directory in [copy, *(path for path in copy.rglob("*") if path.is_dir())]:
            directory.chmod(0o755)
        copy.rename(config)


def _link_together(together: Path, homes: dict[str, Path]) -> None:
    with tempfile.TemporaryDirectory(prefix=".all-", dir=together.parent) as scratch:
        links = Path(scratch) / together.name
        links.mkdir()
        for program in PROGRAMS:
            target = Path("..") / homes[program.module].name / program.name
            (links / program.name).symlink_to(target)
        (links / KUBERAY_CONFIG).symlink_to(Path("..") / homes["kuberay"].name / KUBERAY_CONFIG)
        links.rename(together)
    sync_directory(together.parent)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Let one process build at a time; others wait for it and then find everything built."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("waiting for another process that builds the same programs")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
