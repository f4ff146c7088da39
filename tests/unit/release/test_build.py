import pytest

from release.build import run
from release.errors import ReleaseError


def test_a_command_that_fails_is_told_with_what_it_said(tmp_path):
    with pytest.raises(ReleaseError, match=r"ended with 3:\nbroken"):
        run("sh", "-c", "echo broken >&2; exit 3", root=tmp_path)


def test_the_output_of_a_command_is_returned(tmp_path):
    assert run("sh", "-c", "pwd; echo $X", root=tmp_path, env={"X": "1"}) == f"{tmp_path}\n1\n"
