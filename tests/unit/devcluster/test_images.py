"""Images packed without a container engine."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from devcluster.images.ociimage import (
    File,
    ImageConfig,
    Layer,
    existing_layer,
    layer_from_files,
    layer_from_tree,
    read_archive_identity,
    write_docker_archive,
)


def make_tree(root: Path) -> Path:
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tool").write_text("#!/bin/sh\n")
    (root / "bin" / "tool").chmod(0o755)
    (root / "bin" / "alias").symlink_to("tool")
    (root / "cache").mkdir()
    (root / "cache" / "junk").write_text("junk")
    (root / ("long-" * 30)).write_text("a name beyond 100 characters")
    return root


def names(layer: Layer) -> list[str]:
    with tarfile.open(layer.path) as tar:
        return tar.getnames()


def test_same_tree_gives_same_bytes_whenever_and_in_whatever_order_it_was_made(
    tmp_path: Path,
) -> None:
    first = make_tree(tmp_path / "first")
    second = tmp_path / "second"
    second.mkdir()
    for path in sorted(first.rglob("*"), reverse=True):
        target = second / path.relative_to(first)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target.symlink_to(path.readlink())
        elif path.is_file():
            target.write_bytes(path.read_bytes())
            target.chmod(path.stat().st_mode)

    one = layer_from_tree(first, tmp_path / "1.tar")
    two = layer_from_tree(second, tmp_path / "2.tar")

    assert one.diff_id == two.diff_id
    assert one.path.read_bytes() == two.path.read_bytes()


def test_a_layers_digest_is_that_of_its_file(tmp_path: Path) -> None:
    layer = layer_from_tree(make_tree(tmp_path / "tree"), tmp_path / "layer.tar")
    assert layer.diff_id == "sha256:" + hashlib.sha256(layer.path.read_bytes()).hexdigest()
    assert existing_layer(layer.path) == layer


def test_a_tree_keeps_modes_and_links_lands_under_its_prefix_and_belongs_to_its_owner(
    tmp_path: Path,
) -> None:
    tree = make_tree(tmp_path / "tree")
    layer = layer_from_tree(tree, tmp_path / "layer.tar", prefix="/opt/app", owner=(7, 8))
    with tarfile.open(layer.path) as tar:
        tool = tar.getmember("opt/app/bin/tool")
        alias = tar.getmember("opt/app/bin/alias")
        assert tar.getmember("opt").isdir()
        assert tool.mode == 0o755
        assert (tool.uid, tool.gid, tool.mtime) == (7, 8, 0)
        assert alias.issym()
        assert alias.linkname == "tool"


def test_a_refused_directory_takes_its_content_with_it(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    layer = layer_from_tree(tree, tmp_path / "layer.tar", keep=lambda path: path.name != "cache")
    assert "bin/tool" in names(layer)
    assert not [name for name in names(layer) if name.startswith("cache")]


def test_files_bring_their_parent_directories(tmp_path: Path) -> None:
    files = {"/etc/app/config": File(b"content", mode=0o600, uid=5)}
    layer = layer_from_files(files, tmp_path / "layer.tar", directories=["/tmp"])
    assert names(layer) == ["etc", "etc/app", "etc/app/config", "tmp"]


@pytest.mark.parametrize("path", ["../outside", "/a/../../outside"])
def test_a_path_that_leads_outside_the_image_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="must not contain"):
        layer_from_files({path: File(b"")}, tmp_path / "layer.tar")


def test_a_layer_that_fails_half_way_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        layer_from_files({"/a": File(tmp_path / "missing")}, tmp_path / "out" / "layer.tar")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_archive_holds_config_and_layers_under_their_digests(tmp_path: Path) -> None:
    layers = [
        layer_from_files({"/a": File(b"a")}, tmp_path / "a.tar"),
        layer_from_files({"/b": File(b"b")}, tmp_path / "b.tar"),
    ]
    config = ImageConfig(
        entrypoint=["/run"],
        cmd=["--fast"],
        env={"PATH": "/bin", "HOME": "/"},
        user="65532:65532",
        working_dir="/work",
        labels={"b": "2", "a": "1"},
    )
    archive = tmp_path / "image.tar"

    image_id = write_docker_archive(archive, "example/app:1", layers, config)

    assert read_archive_identity(archive) == (image_id, ["example/app:1"])
    with tarfile.open(archive) as tar:
        manifest = json.load(_member(tar, "manifest.json"))[0]
        written = json.load(_member(tar, manifest["Config"]))
        contents = [_member(tar, name).read() for name in manifest["Layers"]]
    assert written["config"] == {
        "Entrypoint": ["/run"],
        "Cmd": ["--fast"],
        "Env": ["HOME=/", "PATH=/bin"],
        "User": "65532:65532",
        "WorkingDir": "/work",
        "Labels": {"a": "1", "b": "2"},
    }
    digests = ["sha256:" + hashlib.sha256(content).hexdigest() for content in contents]
    assert written["rootfs"]["diff_ids"] == digests


def _member(tar: tarfile.TarFile, name: str) -> io.BufferedReader | tarfile.ExFileObject:
    member = tar.extractfile(name)
    assert member is not None
    return member


def test_another_config_is_another_image(tmp_path: Path) -> None:
    layer = layer_from_files({"/a": File(b"a")}, tmp_path / "a.tar")
    one = write_docker_archive(tmp_path / "1.tar", "x:1", [layer], ImageConfig(cmd=["a"]))
    two = write_docker_archive(tmp_path / "2.tar", "x:1", [layer], ImageConfig(cmd=["b"]))
    assert one != two


def test_identity_of_a_tar_that_is_no_image_is_an_error(tmp_path: Path) -> None:
    layer = layer_from_files({"/a": File(b"a")}, tmp_path / "a.tar")
    with pytest.raises(ValueError, match="no docker-archive"):
        read_archive_identity(layer.path)
