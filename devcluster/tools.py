"""Go programs, built once from pinned modules into a cache outside the checkout.

Each directory below ``devcluster/tools`` is one Go module, so that the programs' dependencies are
independent. Builds go into ``<cache>/tools/<module>-<hash of the module's files>/``; a directory
``all-<hash>`` has links to the programs of all modules.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.shell import Progress, run, sync_directory

_MODULES = Path(__file__).parent / "tools"
_KUBERNETES = "v1.34.4"
_VERSION = "k8s.io/component-base/version"
_KUBERNETES_LDFLAGS = " ".join(
    # Without these, /version has placeholders that break clients.
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
    """Duration of a cold build on two cores, for the progress line."""
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

_PROMETHEUS_OPERATOR = "github.com/prometheus-operator/prometheus-operator"
# Built only by `monitoring-up`: most clusters need none of these.
MONITORING_PROGRAMS = (
    Program(
        "prometheus-operator",
        "prometheus-operator",
        f"{_PROMETHEUS_OPERATOR}/cmd/operator",
        "~3 min",
    ),
    Program(
        "prometheus-config-reloader",
        "prometheus-operator",
        f"{_PROMETHEUS_OPERATOR}/cmd/prometheus-config-reloader",
        "~10 s",
    ),
    Program(
        "prometheus", "prometheus", "github.com/prometheus/prometheus/cmd/prometheus", "~9 min"
    ),
)
# Built only for `kwok`: nodes and pods that are objects alone.
KWOK_PROGRAMS = (Program("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok", "~1 min"),)
KWOK_STAGES = "kwok-stages"
"""What kwok does to a node and to a pod, taken from its module."""
KUEUE_PROGRAMS = (Program("kueue", "kueue", "sigs.k8s.io/kueue/cmd/kueue", "~2 min"),)
"""Built only by `kueue-up`."""
LWS_PROGRAMS = (Program("lws", "lws", "sigs.k8s.io/lws/cmd", "~2 min"),)
"""Built only by `lws-up`."""
STORE_PROGRAMS = (
    Program("versitygw", "versitygw", "github.com/versity/versitygw/cmd/versitygw", "~3 min"),
)
"""Built only for tests of object storage: a server that speaks S3."""
MINIO_PROGRAMS = (Program("minio", "minio", "github.com/minio/minio", "~5 min"),)
"""Built only for `make test-store MINIO=1`: another server that speaks S3."""
GCS_PROGRAMS = (
    Program("fake-gcs-server", "fake-gcs-server", "github.com/fsouza/fake-gcs-server", "~2 min"),
)
"""Built only for `make test-store`: a server that speaks Google's API of Cloud Storage."""
POLICY_PROGRAMS = (
    Program(
        "kube-router",
        "kube-router",
        "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router",
        "~3 min",
    ),
)
"""Built only by `policies-up`."""
KUEUE_CONFIG = "kueue-config"
"""Kueue's own kustomize manifests, taken from its module."""
LWS_CONFIG = "lws-config"
"""LWS's own kustomize manifests, taken from its module."""
PROMETHEUS_CONFIG = "prometheus-config"
"""The Prometheus Operator's CRDs and roles, taken from its module."""

KUBERAY_CONFIG = "kuberay-config"
"""KubeRay's own kustomize manifests, taken from its module."""


@dataclass(frozen=True)
class _Manifests:
    """Folders of YAML in the module of a program."""

    name: str
    module: str
    """See `Program.module`."""
    go_module: str
    source: str
    folders: tuple[str, ...]


_KUBERAY = _Manifests(
    KUBERAY_CONFIG,
    "kuberay",
    "github.com/ray-project/kuberay/ray-operator",
    "config",
    ("crd", "rbac", "manager", "default"),
)
_PROMETHEUS = _Manifests(
    PROMETHEUS_CONFIG,
    "prometheus-operator",
    _PROMETHEUS_OPERATOR,
    "example",
    ("prometheus-operator-crd", "rbac/prometheus-operator", "rbac/prometheus"),
)

_KUEUE = _Manifests(KUEUE_CONFIG, "kueue", "sigs.k8s.io/kueue", "config", ("components", "default"))
_LWS = _Manifests(
    LWS_CONFIG,
    "lws",
    "sigs.k8s.io/lws",
    "config",
    ("crd", "default", "internalcert", "manager", "rbac", "webhook"),
)


_KWOK = _Manifests(
    KWOK_STAGES, "kwok", "sigs.k8s.io/kwok", "kustomize/stage", ("node/fast", "pod/fast")
)


@dataclass(frozen=True)
class Tools:
    """The built programs."""

    directory: Path
    """Folder with every program by its name, and their manifests."""
    key: str
    """A key that changes with any of the programs."""

    def path(self, name: str) -> Path:
        return self.directory / name


def cache_root() -> Path:
    """trainsync's cache folder, outside the checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trainsync"


def tools_key() -> str:
    """Hash of the programs' sources; needs no build."""
    return _key(_module_hashes(PROGRAMS))


def _module_hashes(programs: Sequence[Program]) -> dict[str, str]:
    modules = {program.module for program in programs}
    return {module: module_hash(_MODULES / module) for module in modules}


def _key(hashes: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:12]


def ensure_tools(progress: Progress) -> Tools:
    """The programs of a cluster; missing ones are built one after another.

    Raises DevclusterError when Go is missing or a build fails.
    """
    return _ensure(PROGRAMS, "all", [_KUBERAY], progress)


def ensure_monitoring_tools(progress: Progress) -> Tools:
    """Prometheus, and the Prometheus Operator with its manifests; like `ensure_tools`."""
    return _ensure(MONITORING_PROGRAMS, "monitoring", [_PROMETHEUS], progress)


def ensure_kwok(progress: Progress) -> Tools:
    """kwok with its stages; like `ensure_tools`."""
    return _ensure(KWOK_PROGRAMS, "fakes", [_KWOK], progress)


def ensure_kueue_tools(progress: Progress) -> Tools:
    """Kueue with its manifests; like `ensure_tools`."""
    return _ensure(KUEUE_PROGRAMS, "kueue", [_KUEUE], progress)


def ensure_lws_tools(progress: Progress) -> Tools:
    """LWS with its manifests; like `ensure_tools`."""
    return _ensure(LWS_PROGRAMS, "lws", [_LWS], progress)


def ensure_policy_tools(progress: Progress) -> Tools:
    """The policy controller; like `ensure_tools`."""
    return _ensure(POLICY_PROGRAMS, "policies", [], progress)


def ensure_store_servers(progress: Progress) -> Tools:
    """Servers of object storage; like `ensure_tools`."""
    return _ensure(STORE_PROGRAMS, "stores", [], progress)


def ensure_minio(progress: Progress) -> Tools:
    """MinIO; like `ensure_tools`."""
    return _ensure(MINIO_PROGRAMS, "minio", [], progress)


def ensure_gcs(progress: Progress) -> Tools:
    """fake-gcs-server; like `ensure_tools`."""
    return _ensure(GCS_PROGRAMS, "gcs", [], progress)


def _ensure(
    programs: Sequence[Program], name: str, manifests: Sequence[_Manifests], progress: Progress
) -> Tools:
    hashes = _module_hashes(programs)
    key = _key(hashes)
    root = cache_root() / "tools"
    together = root / f"{name}-{key}"
    if together.is_dir():
        return Tools(together, key)
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / ".lock", progress):
        homes = {module: root / f"{module}-{hashes[module]}" for module in hashes}
        missing = [
            program for program in programs if not (homes[program.module] / program.name).exists()
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
        for part in manifests:
            if not (homes[part.module] / part.name).is_dir():
                _copy_manifests(part, homes[part.module])
        parts = [(p.module, p.name) for p in programs] + [(m.module, m.name) for m in manifests]
        _link_together(together, homes, parts)
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


def _copy_manifests(part: _Manifests, home: Path) -> None:
    downloaded = run(
        ["go", "mod", "download", "-json", part.go_module],
        cwd=_MODULES / part.module,
        env=_go_env(),
        timeout=300,
    )
    source = Path(json.loads(downloaded)["Dir"]) / part.source
    with tempfile.TemporaryDirectory(prefix=".manifests-", dir=home) as scratch:
        copy = Path(scratch) / part.name
        copy.mkdir()
        for folder in part.folders:
            # copyfile: the module cache is read-only, and a copy with its modes could not be
            # removed.
            shutil.copytree(
                source / folder, copy / folder, copy_function=shutil.copyfile, dirs_exist_ok=True
            )
        for directory in [copy, *(path for path in copy.rglob("*") if path.is_dir())]:
            directory.chmod(0o755)
        copy.rename(home / part.name)


def _link_together(
    together: Path, homes: dict[str, Path], parts: Sequence[tuple[str, str]]
) -> None:
    with tempfile.TemporaryDirectory(prefix=".links-", dir=together.parent) as scratch:
        links = Path(scratch) / together.name
        links.mkdir()
        for module, name in parts:
            (links / name).symlink_to(Path("..") / homes[module].name / name)
        links.rename(together)
    sync_directory(together.parent)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Lock: one process builds at a time; the others wait and then find the finished build."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("waiting for another process that builds the same programs")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
