import zipfile

import pytest

from release.contents import check_wheel, wheel_files
from release.errors import ReleaseError

WHOLE = [
    "trainsync/__init__.py",
    "trainsync/py.typed",
    "trainsync/storage/atomic.py",
    "trainsync_operator/__main__.py",
    "trainsync_operator/py.typed",
    "trainsync-0.1.0.dist-info/METADATA",
]


def test_a_wheel_of_our_packages_is_counted_by_part(tmp_path):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in WHOLE:
            archive.writestr(name, "")
    assert check_wheel(wheel_files(wheel)) == {
        "trainsync": 2,
        "trainsync/storage": 1,
        "trainsync_operator": 2,
        "trainsync-0.1.0.dist-info": 1,
    }


@pytest.mark.parametrize(
    "stranger",
    [
        "tests/unit/test_x.py",
        "trainsync/tests/test_x.py",
        "trainsync/storage/test_atomic.py",
        "trainsync/__pycache__/x.pyc",
        "devcluster/cli.py",
        "README.md",
    ],
)
def test_what_does_not_belong_into_the_wheel_is_named(stranger):
    with pytest.raises(ReleaseError, match=f"does not belong there: {stranger}"):
        check_wheel([*WHOLE, stranger])


def test_a_wheel_without_its_types_is_refused():
    with pytest.raises(ReleaseError, match=r"lacks trainsync/py\.typed"):
        check_wheel([name for name in WHOLE if name != "trainsync/py.typed"])
