import pytest

from charts import readme


def test_the_readme_has_the_values_as_they_are() -> None:
    text = (readme.CHART / "README.md").read_text()
    values = (readme.CHART / "values.yaml").read_text()
    assert readme.with_table(text, values) == text, "`make chart-readme` brings it up to date"


def test_comments_become_rows_and_keys_without_one_become_groups() -> None:
    text = """\
# About the file.

group:
  # The first
  # of two lines.
  first: 1
  # A | bar.
  second:
    deeper: [a]
    # not a row: it belongs to `second`
    still: b

# Last.
last: ""
"""
    rows = [(value.path, value.default, value.meaning) for value in readme.read_values(text)]
    assert rows == [
        (("group", "first"), 1, "The first of two lines."),
        (("group", "second"), {"deeper": ["a"], "still": "b"}, "A | bar."),
        (("last",), "", "Last."),
    ]
    assert '| `last` | `""` | Last. |' in readme.table(readme.read_values(text))
    assert "A \\| bar." in readme.table(readme.read_values(text))


def test_a_value_without_a_comment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group\.second has no comment"):
        list(readme.read_values("group:\n  # One.\n  first: 1\n\n  second: 2\n"))


def test_a_readme_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README\.md has no lines"):
        readme.with_table("# Chart\n", "# One.\none: 1\n")
