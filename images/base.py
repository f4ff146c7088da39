"""The base layer of our images: a slim Debian with Python and our user."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from devcluster.errors import DevclusterError
from devcluster.images.ociimage import Layer, existing_layer, layer_from_tree
from devcluster.shell import Progress, run
from images.cache import cache_root, key_of, made_once, remove
from images.uv import PYTHON

SUITE = "bookworm"
# procps: for `ps` when debugging in a pod; libnuma1: for vLLM on a CPU.
PACKAGES = ("python3", "ca-certificates", "procps", "libnuma1")
USER = 65532
USER_NAME = "trainsync"
HOME = f"/home/{USER_NAME}"

# Removed from the base system: an entrypoint starts every program and no package is installed
# later, so package management, documentation, locales and Perl (used only by Debian's scripts) are
# not needed.
_BASE_DROPPED = (
    "boot",
    "etc/apt",
    "etc/cron.daily",
    "etc/logrotate.d",
    "etc/perl",
    "etc/systemd",
    "etc/init.d",
    "usr/bin/apt*",
    "usr/bin/dpkg*",
    "usr/bin/gpgv",
    "usr/bin/localedef",
    "usr/bin/perl*",
    "usr/lib/apt",
    "usr/lib/dpkg",
    "usr/lib/systemd",
    "usr/lib/python3.11/config-*",
    "usr/lib/python3.11/idlelib",
    "usr/lib/python3.11/lib2to3",
    "usr/lib/python3.11/pydoc_data",
    "usr/lib/python3.11/test",
    "usr/lib/python3.11/turtle*",
    "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/libapt-*",
    "usr/lib/x86_64-linux-gnu/perl*",
    "usr/sbin/debugfs",
    "usr/sbin/e2*",
    "usr/sbin/fsck*",
    "usr/sbin/mke2fs",
    "usr/sbin/mkfs*",
    "usr/sbin/resize2fs",
    "usr/sbin/tune2fs",
    "usr/share/bash-completion",
    "usr/share/bug",
    "usr/share/common-licenses",
    "usr/share/debconf",
    "usr/share/doc/*/changelog*",
    "usr/share/doc/*/NEWS*",
    "usr/share/doc/*/README*",
    "usr/share/doc/*/examples",
    "usr/share/i18n",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/perl*",
    "usr/share/polkit-1",
    "usr/share/zoneinfo/posix",
    "usr/share/zoneinfo/right",
    "var/cache/*",
    "var/lib/apt",
    "var/lib/dpkg/*-old",
    "var/lib/dpkg/info",
    "var/log/*",
)


def keep_of_base(path: PurePosixPath) -> bool:
    """Whether to keep a path of the base system (relative to its root)."""
    absolute = "/" / path
    return not any(absolute.match(f"/{pattern}") for pattern in _BASE_DROPPED)


def base_layer(progress: Progress) -> Layer:
    """Debian with Python and the user, about 85 MB; made by debootstrap (40 s), then cached."""
    key = key_of(Path(__file__).read_bytes())
    path = cache_root() / "rootfs" / key / "base.tar"
    if not path.exists() and os.geteuid() != 0:
        raise DevclusterError("debootstrap needs root: run this once as root, then it is cached")

    def make(temporary: Path) -> None:
        progress.say(f"making the base system of Debian {SUITE} with debootstrap, may take 2 min")
        tree = temporary.with_name("tree")
        remove(tree)
        options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
        run(["debootstrap", *options, SUITE, tree], timeout=900)
        _precompile(tree)
        _add_user(tree)
        _drop_privileged_bits(tree)
        layer_from_tree(tree, temporary, keep=keep_of_base, owner=None)
        remove(tree)

    return existing_layer(made_once(path, make))


def _precompile(tree: Path) -> None:
    """Recompile Debian's bytecode without times: the packer sets all times to zero."""
    run(
        [
            *("chroot", tree, PYTHON, "-m", "compileall", "-q", "-f"),
            *("--invalidation-mode", "unchecked-hash", "/usr/lib/python3.11", "-x", "lib2to3"),
        ],
        timeout=300,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )


def _add_user(tree: Path) -> None:
    """Add our user to the password database: some libraries look up the uid there."""
    for file, line in (
        ("passwd", f"{USER_NAME}:x:{USER}:{USER}::{HOME}:/bin/bash\n"),
        ("group", f"{USER_NAME}:x:{USER}:\n"),
    ):
        with (tree / "etc" / file).open("a") as stream:
            stream.write(line)
    home = tree / HOME.lstrip("/")
    home.mkdir(parents=True)
    os.chown(home, USER, USER)


def _drop_privileged_bits(tree: Path) -> None:
    """Remove setuid and setgid bits."""
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o6000:
            path.chmod(path.stat().st_mode & 0o1777)
