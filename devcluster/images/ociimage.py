"""Pack container images without a container engine.

The result is a docker-archive: a tar of layers, a configuration and ``manifest.json``, which
containerd, Docker and podman load. The same input gives the same bytes: members are sorted, and
times, owners and permissions come from the caller, never from the machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

_CREATED = "1970-01-01T00:00:00Z"


@dataclass(frozen=True)
class Layer:
    """An uncompressed layer tar on disk."""

    path: Path
    diff_id: str
    """``sha256:`` and the hex digest of the file."""


@dataclass(frozen=True)
class ImageConfig:
    """The default configuration of the image's containers."""

    entrypoint: Sequence[str] = ()
    cmd: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    """``uid:gid``, numeric, so that ``runAsNonRoot`` can be checked; empty for root."""
    working_dir: str = "/"
    labels: Mapping[str, str] = field(default_factory=dict)
    architecture: str = "amd64"


@dataclass(frozen=True)
class File:
    """A file of a layer: its bytes or its path on disk."""

    source: bytes | Path
    mode: int = 0o644
    uid: int = 0
    gid: int = 0


def layer_from_files(
    files: Mapping[str, File], out: Path, *, directories: Iterable[str] = ()
) -> Layer:
    """Write a layer of single files to ``out``; keys are paths inside the image.

    Parent directories are made with mode 0755, ``directories`` (empty ones) with 0755 too.
    """
    paths = {_inside(name): file for name, file in files.items()}
    folders = {_inside(name) for name in directories}
    for path in [*paths, *folders]:
        folders.update(parent for parent in PurePosixPath(path).parents if str(parent) != ".")
    with _LayerWriter(out) as writer:
        for path in sorted({*paths, *folders}):
            if path in paths:
                writer.add_file(path, paths[path])
            else:
                info = _info(path, 0o755)
                info.type = tarfile.DIRTYPE
                writer.tar.addfile(info)
    return writer.layer()


def layer_from_tree(
    root: Path,
    out: Path,
    *,
    prefix: str = "/",
    keep: Callable[[PurePosixPath], bool] = lambda path: True,
    owner: tuple[int, int] | None = (0, 0),
) -> Layer:
    """Write a layer with all files below ``root`` to ``out``.

    ``prefix`` is the tree's path in the image. ``keep`` gets a path relative to ``root`` and may
    refuse it (a refused directory is left out with its content). ``owner`` is (uid, gid) of every
    member; None keeps the owners on disk. Symbolic links stay links, hard links become copies,
    devices and sockets are left out; permission bits are kept.
    """
    top = _inside(prefix)
    with _LayerWriter(out) as writer:
        parents = [top, *PurePosixPath(top).parents] if str(top) != "." else []
        for parent in sorted(path for path in parents if str(path) != "."):
            info = _info(parent, 0o755)
            info.type = tarfile.DIRTYPE
            writer.tar.addfile(info)
        for relative in _walk(root, keep):
            writer.add_path(root / relative, top / relative, owner)
    return writer.layer()


def existing_layer(path: Path) -> Layer:
    """An existing layer tar, for instance from a cache."""
    with path.open("rb") as file:
        return Layer(path, "sha256:" + hashlib.file_digest(file, "sha256").hexdigest())


def image_config_json(layers: Sequence[Layer], config: ImageConfig) -> bytes:
    """The image's configuration; its sha256 is the image ID."""
    document = {
        "architecture": config.architecture,
        "os": "linux",
        "created": _CREATED,
        "config": {
            "Entrypoint": list(config.entrypoint),
            "Cmd": list(config.cmd),
            "Env": [f"{name}={value}" for name, value in sorted(config.env.items())],
            "User": config.user,
            "WorkingDir": config.working_dir,
            "Labels": dict(sorted(config.labels.items())),
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": _CREATED} for _ in layers],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def write_docker_archive(
    path: Path, repo_tag: str, layers: Sequence[Layer], config: ImageConfig
) -> str:
    """Write an image to ``path`` (atomically) and return its ID, ``sha256:<hex>``.

    ``repo_tag`` is the full name with a tag, for instance ``trainsync.dev/operator:dev``.
    """
    config_json = image_config_json(layers, config)
    image_id = hashlib.sha256(config_json).hexdigest()
    names = [layer.diff_id.removeprefix("sha256:") + "/layer.tar" for layer in layers]
    manifest = [{"Config": f"{image_id}.json", "RepoTags": [repo_tag], "Layers": names}]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as raw:
            with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
                # The small members come first: the image ID can be read from the beginning of the
                # file.
                _add_bytes(tar, "manifest.json", json.dumps(manifest).encode())
                _add_bytes(tar, f"{image_id}.json", config_json)
                for name, layer in dict(zip(names, layers, strict=True)).items():
                    info = _info(PurePosixPath(name), 0o644)
                    info.size = layer.path.stat().st_size
                    with layer.path.open("rb") as content:
                        tar.addfile(info, content)
            raw.flush()
            os.fsync(raw.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return f"sha256:{image_id}"


def read_archive_identity(path: Path) -> tuple[str, list[str]]:
    """Image ID and names in a docker-archive.

    Raises ValueError when the file is no docker-archive with exactly one image.
    """
    try:
        with tarfile.open(path) as tar:
            member = tar.extractfile("manifest.json")
            manifest = json.loads(member.read()) if member else []
            if len(manifest) != 1:
                raise ValueError(f"{path} holds {len(manifest)} images, expected exactly one")
            config = tar.extractfile(manifest[0]["Config"])
            content = config.read() if config else b""
    except (tarfile.TarError, KeyError) as error:
        raise ValueError(f"{path} is no docker-archive: {error}") from error
    return "sha256:" + hashlib.sha256(content).hexdigest(), list(manifest[0]["RepoTags"] or [])


class _LayerWriter:
    """Writes a layer tar to a temporary file beside ``out`` and renames the complete file."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")

    def __enter__(self) -> _LayerWriter:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._raw = self._temporary.open("wb")
        self._hashing = _HashingFile(self._raw)
        # PAX: paths of Python packages exceed the 100 characters of older formats.
        self.tar = tarfile.open(fileobj=self._hashing, mode="w", format=tarfile.PAX_FORMAT)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.tar.close()
        self._raw.close()
        if error is None:
            self._temporary.rename(self._out)
        else:
            self._temporary.unlink(missing_ok=True)

    def layer(self) -> Layer:
        return Layer(self._out, "sha256:" + self._hashing.digest.hexdigest())

    def add_file(self, path: PurePosixPath, file: File) -> None:
        info = _info(path, file.mode)
        info.uid, info.gid = file.uid, file.gid
        if isinstance(file.source, bytes):
            info.size = len(file.source)
            self.tar.addfile(info, io.BytesIO(file.source))
            return
        info.size = file.source.stat().st_size
        with file.source.open("rb") as content:
            self.tar.addfile(info, content)

    def add_path(self, path: Path, name: PurePosixPath, owner: tuple[int, int] | None) -> None:
        stat = path.lstat()
        uid, gid = owner if owner is not None else (stat.st_uid, stat.st_gid)
        mode = stat.st_mode & 0o7777
        if path.is_symlink():
            info = _info(name, 0o777)
            info.type = tarfile.SYMTYPE
            info.linkname = str(path.readlink())
        elif path.is_dir():
            info = _info(name, mode)
            info.type = tarfile.DIRTYPE
        elif path.is_file():
            self.add_file(name, File(path, mode, uid, gid))
            return
        else:
            return
        info.uid, info.gid = uid, gid
        self.tar.addfile(info)


class _HashingFile(io.RawIOBase):
    """Computes the sha256 of the written bytes, so that a layer is read once."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data) -> int:  # type: ignore[no-untyped-def]
        self.digest.update(data)
        return self._file.write(data)


def _walk(root: Path, keep: Callable[[PurePosixPath], bool]) -> Iterable[PurePosixPath]:
    """Kept paths below ``root``, relative to ``root``, parents first, sorted."""

    def below(directory: PurePosixPath) -> Iterable[PurePosixPath]:
        with os.scandir(root / directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            relative = directory / entry.name
            if not keep(relative):
                continue
            yield relative
            if entry.is_dir(follow_symlinks=False):
                yield from below(relative)

    yield from below(PurePosixPath())


def _inside(name: str) -> PurePosixPath:
    """A path inside the image, relative to its root. Raises ValueError for a path outside."""
    path = PurePosixPath(name.lstrip("/"))
    if ".." in path.parts:
        raise ValueError(f"path in an image must not contain '..': {name}")
    return path


def _info(path: PurePosixPath, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(str(path))
    info.mode = mode
    info.mtime = 0
    return info


def _add_bytes(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = _info(PurePosixPath(name), 0o644)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
