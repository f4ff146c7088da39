import ast
from pathlib import Path, PurePosixPath

import pytest

from images.base import keep_of_base
from images.slim import slim_python

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("usr/bin/python3.11", True),
        ("usr/bin/bash", True),
        ("usr/bin/ps", True),
        ("usr/bin/perl5.36.0", False),
        ("usr/share/doc/bash/copyright", True),
        ("usr/share/doc/bash/changelog.gz", False),
        ("usr/lib/python3.11/asyncio/__pycache__/events.cpython-311.pyc", True),
        ("usr/lib/python3.11/test", False),
        ("etc/ssl/certs/ca-certificates.crt", True),
        ("var/lib/dpkg/status", True),
        ("var/lib/dpkg/info", False),
        ("opt/boot", True),
    ],
)
def test_the_base_keeps_what_programs_read(path: str, kept: bool) -> None:
    assert keep_of_base(PurePosixPath(path)) is kept


def test_slimming_keeps_one_half_of_the_kubernetes_client(tmp_path: Path) -> None:
    for name in (
        "kubernetes/__init__.py",
        "kubernetes/client/big.py",
        "kubernetes/watch/watch.py",
        "kubernetes/aio/__init__.py",
        "kubernetes/aio/client/__init__.py",
        "other/tests/test_it.py",
        "other/code.py",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise ImportError\n" if name == "kubernetes/__init__.py" else "x = 1\n")
    freed = slim_python(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")}
    assert left == {
        "kubernetes/__init__.py",
        "kubernetes/aio/__init__.py",
        "kubernetes/aio/client/__init__.py",
        "other/code.py",
    }
    assert freed == len("raise ImportError\n") + 3 * len("x = 1\n")
    compile((tmp_path / "kubernetes/__init__.py").read_text(), "x", "exec")
    assert "raise" not in (tmp_path / "kubernetes/__init__.py").read_text()


def test_our_code_imports_only_the_half_that_images_hold() -> None:
    wrong = []
    for root in ("worker_lib/trainsync", "operator/trainsync_operator"):
        for path in (REPOSITORY / root).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                wrong += [
                    f"{path.relative_to(REPOSITORY)}:{node.lineno} imports {name}"
                    for name in names
                    if name.split(".")[0] == "kubernetes" and name.split(".")[1:2] != ["aio"]
                ]
    assert wrong == []
