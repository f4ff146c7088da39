"""Ranks that were started side by side."""

import pytest
from trainsync.runtime.attempt.spmd import is_spmd
from trainsync.runtime.errors import SettingsError


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "1"}])
def test_a_process_is_alone_where_the_environment_names_no_others(environ: dict[str, str]) -> None:
    assert not is_spmd(environ)
    assert is_spmd(environ | {"WORLD_SIZE": "2"})


def test_a_world_size_that_is_no_number_is_named() -> None:
    with pytest.raises(SettingsError, match="WORLD_SIZE is 'two'; expected a whole number"):
        is_spmd({"WORLD_SIZE": "two"})
