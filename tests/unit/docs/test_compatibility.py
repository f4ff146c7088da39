"""The combinations of verl and torch: their locks, the docs' table and `make` say the same."""

import tomllib

import pytest

from tests.compat.__main__ import files
from tests.compat.combinations import ALL, FOLDER, TESTS, Combination, chosen
from tests.unit.docs.pages import ROOT

PAGE = ROOT / "docs" / "upgrade.md"


@pytest.mark.parametrize("combination", ALL, ids=lambda one: one.name)
def test_every_combination_is_locked_to_its_versions(combination: Combination) -> None:
    if combination.locked:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        assert f"verl=={combination.verl}" in extras["verl"]
        assert f"torch=={combination.torch}" in extras["worker"]
        return
    lines = combination.lock.read_text().splitlines()
    assert {f"verl=={combination.verl}", f"torch=={combination.torch}"} <= set(lines)
    assert all("==" in line for line in lines if not line.startswith("#"))


def test_there_is_no_lock_of_another_combination() -> None:
    assert set(FOLDER.glob("*.txt")) == {one.lock for one in ALL if not one.locked}


def test_the_page_has_a_row_for_every_combination_and_no_other() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `verl-")]
    names = [row.split("`")[1] for row in rows]
    assert names == [one.name for one in ALL]
    for row, combination in zip(rows, ALL, strict=True):
        assert f"| {combination.verl} | {combination.torch} |" in row


def test_every_pattern_of_tests_finds_some() -> None:
    assert all(list(ROOT.glob(pattern)) for pattern in TESTS)
    assert "tests/distributed/engines" in files()


def test_a_part_of_the_name_chooses_and_one_that_is_in_none_is_refused() -> None:
    assert [one.verl for one in chosen(["verl-0.8"])] == ["0.8.0", "0.8.0"]
    assert chosen([]) == list(ALL)
    with pytest.raises(ValueError, match=r"no combination has 'verl-0\.7' in its name"):
        chosen(["verl-0.7"])
