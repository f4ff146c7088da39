"""The tree can be walked without a guide: folders are small, and each says where to begin."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = sorted(
    found.parent.relative_to(ROOT)
    for sources in ("worker_lib/trainsync", "operator/trainsync_operator")
    for found in (ROOT / sources).rglob("__init__.py")
)
# Of a package with more, a part has a name of its own.
MOST_MODULES = 18


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_a_package_is_small_and_says_where_to_begin(package: Path) -> None:
    modules = [path for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES
    said = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    assert said, "its docstring says what lives there"
    # A user begins the library itself at its public names.
    assert "begin at" in said.lower() or package.name == "trainsync"
