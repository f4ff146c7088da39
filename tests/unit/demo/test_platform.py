from pathlib import Path

import pytest

from demo import platform
from demo.errors import DemoError
from demo.kubectl import Kubectl
from demo.platform import Images, Platform, devcluster_name, own_cluster, prepare
from devcluster.shell import Progress

IMAGES = Images("registry.example/op:1", "registry.example/mon:1", "registry.example/ray:1")


@pytest.mark.parametrize(
    ("kubeconfig", "own"),
    [
        (None, False),
        ("", False),
        ("/var/lib/trainsync/devcluster/dev/kubeconfig", False),
        ("/home/somebody/.kube/config", True),
    ],
)
def test_only_another_clusters_kubeconfig_is_ones_own(kubeconfig: str | None, own: bool) -> None:
    assert own_cluster(kubeconfig) is own


@pytest.mark.parametrize(
    ("kubeconfig", "name"),
    [
        (None, "dev"),
        ("/var/lib/trainsync/devcluster/dev/kubeconfig", "dev"),
        ("/var/lib/trainsync/devcluster/other/kubeconfig", "other"),
    ],
)
def test_a_devclusters_kubeconfig_names_that_devcluster(kubeconfig: str | None, name: str) -> None:
    assert devcluster_name(kubeconfig) == name


def test_a_cluster_of_ones_own_needs_images(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("")
    with pytest.raises(DemoError, match="--operator-image"):
        prepare(str(config), None, Progress())


def test_images_without_a_cluster_of_ones_own_are_refused() -> None:
    with pytest.raises(DemoError, match="set KUBECONFIG too"):
        prepare(None, IMAGES, Progress())


def test_a_list_of_kubeconfigs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="the path of one file"):
        prepare(f"{tmp_path}/a:{tmp_path}/b", IMAGES, Progress())


def test_on_a_cluster_of_ones_own_the_given_images_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kubectl", "helm"):
        program = tmp_path / name
        program.write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/calls\n')
        program.chmod(0o755)
    config = tmp_path / "config"
    config.write_text("")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = prepare(str(config), IMAGES, Progress())
    assert found == Platform(
        Kubectl(tmp_path / "kubectl", config), tmp_path / "helm", IMAGES, environment=None
    )
    found.install_chart("op", ["runs"], "replicas=2")
    words = (tmp_path / "calls").read_text().splitlines()[-1].split()
    assert words[:2] == ["helm", f"--kubeconfig={config}"]
    for value in ("image.repository=registry.example/op", "image.tag=1", "replicas=2"):
        assert value in words
    assert "watchNamespaces={runs}" in words


@pytest.mark.parametrize("image", ["operator", "registry.example:5000/operator"])
def test_an_image_without_a_tag_is_refused(image: str) -> None:
    with pytest.raises(DemoError, match="has no tag"):
        platform._image_values("image", image)
