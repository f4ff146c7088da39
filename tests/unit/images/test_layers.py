import importlib.util
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from images.layers import CODE, code_layer
from images.uv import PYTHON

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} packs the images")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "trainsync"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "__pycache__" / "stale.cpython-311.pyc").write_bytes(b"stale")
    (folder / "__init__.py").write_text("x = 1\n")
    (folder / "py.typed").write_text("")
    (folder / "__init__.py").chmod(0o600)
    return folder


def test_a_code_layer_has_code_bytecode_and_the_command(tmp_path: Path, package: Path) -> None:
    layer = code_layer("monitor", {"trainsync": package}, tmp_path / "out")
    with tarfile.open(layer.path) as tar:
        files = {member.name: member for member in tar.getmembers() if member.isfile()}
        base = f"{CODE.lstrip('/')}/trainsync"
        assert sorted(files) == [
            f"{base}-{version('trainsync')}.dist-info/METADATA",
            f"{base}-{version('trainsync')}.dist-info/entry_points.txt",
            f"{base}/__init__.py",
            f"{base}/__pycache__/__init__.cpython-311.pyc",
            f"{base}/py.typed",
            "usr/local/bin/trainsync",
        ]
        assert files[f"{base}/__init__.py"].mode == 0o644
        assert files["usr/local/bin/trainsync"].mode == 0o755
        stream = tar.extractfile(f"{base}/__pycache__/__init__.cpython-311.pyc")
        assert stream is not None
        header = stream.read(16)
    assert header[:4] == importlib.util.MAGIC_NUMBER
    # 1: by hash, and the check of the source is off: the packer sets every time to zero.
    assert int.from_bytes(header[4:8], "little") == 1


def test_the_same_code_gives_the_same_layer(tmp_path: Path, package: Path) -> None:
    first = code_layer("a", {"trainsync": package}, tmp_path / "one")
    second = code_layer("a", {"trainsync": package}, tmp_path / "two")
    assert first.diff_id == second.diff_id
    (package / "__init__.py").write_text("x = 2\n")
    assert code_layer("a", {"trainsync": package}, tmp_path / "two").diff_id != first.diff_id


def test_an_image_without_the_library_has_no_command(tmp_path: Path, package: Path) -> None:
    trees = {"trainsync/__init__.py": package / "__init__.py"}
    layer = code_layer("operator", trees, tmp_path / "out")
    with tarfile.open(layer.path) as tar:
        assert "usr/local/bin/trainsync" not in tar.getnames()
