"""Finds and installs missing Debian packages of a cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.shell import PATH, Progress, run

# Each with a file that shows that it is installed: a program's name or an absolute path.
_PROOFS = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/ptp",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "iproute2": "ip",
    "openssl": "openssl",
    "debootstrap": "debootstrap",
    "mount": "mount",
    "util-linux": "nsenter",
}
POLICY_PACKAGES = {"ipset": "ipset"}
"""Of the policy controller, in the same form."""


def missing_packages(wanted: Mapping[str, str] = _PROOFS) -> list[str]:
    """Names of the Debian packages that are not installed, sorted."""
    return sorted(package for package, proof in wanted.items() if not _present(proof))


def _present(proof: str) -> bool:
    if proof.startswith("/"):
        return Path(proof).exists()
    return shutil.which(proof, path=PATH) is not None


def ensure_packages(progress: Progress, wanted: Mapping[str, str] = _PROOFS) -> None:
    """Install missing packages with apt-get. Raises DevclusterError if apt-get cannot."""
    missing = missing_packages(wanted)
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        raise DevclusterError(f"install these first (there is no apt-get here): {names}")
    progress.say(f"installing Debian packages, may take a minute: {names}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-q"], timeout=300, env=env)
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    run(install, timeout=900, env=env)
    still = missing_packages(wanted)
    if still:
        raise DevclusterError(f"apt-get succeeded but these are still missing: {' '.join(still)}")
