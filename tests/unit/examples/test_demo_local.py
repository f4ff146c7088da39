"""The directory of the local demo is replaced if a demo has made it, and no other is."""

from pathlib import Path

import pytest
from tiny_grpo.demo_local import DemoError, _make_anew


def test_what_a_demo_has_made_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    _make_anew(directory)
    (directory / "run").mkdir()
    for name in ("attempt-0.log", "history.jsonl"):
        (directory / name).touch()
    _make_anew(directory)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("other", [["run/model.pt"], ["attempt-0.log", "run/x", "thesis.tex"]])
def test_another_directory_stays_as_it_is(tmp_path: Path, other: list[str]) -> None:
    for name in other:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(DemoError, match="not one that a demo has made"):
        _make_anew(tmp_path)
    assert all((tmp_path / name).exists() for name in other)
