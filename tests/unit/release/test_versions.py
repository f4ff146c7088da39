from pathlib import Path

import pytest

from release.errors import ReleaseError
from release.versions import agreed_version, newest_entry, stated_versions

ROOT = Path(__file__).parents[3]


def test_all_files_of_this_repository_state_one_version():
    stated = stated_versions(ROOT)
    assert len(stated) == 4
    assert agreed_version(stated) == stated["pyproject.toml"]


def test_versions_that_differ_are_named_with_their_files():
    with pytest.raises(ReleaseError, match=r"a says 1\.0\.0, b says 1\.0\.1"):
        agreed_version({"a": "1.0.0", "b": "1.0.1"})


def test_what_is_not_released_is_no_entry_of_the_changelog():
    text = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n## [0.1.0]\n"
    assert newest_entry(text) == "0.2.0"


def test_a_changelog_without_a_version_is_refused():
    with pytest.raises(ReleaseError, match="no entry"):
        newest_entry("# Changelog\n\n## [Unreleased]\n")
