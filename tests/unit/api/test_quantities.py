"""`whole_bytes`: quantities of bytes in Kubernetes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.api.quantities import SIZE_PATTERN, whole_bytes


@pytest.mark.parametrize(
    ("quantity", "size"),
    [
        (0, 0),
        (1024, 1024),
        ("512Mi", 512 << 20),
        ("1.5Gi", 3 << 29),
        ("64M", 64_000_000),
        ("1k", 1000),
        (".5Ki", 512),
        ("2E", 2 * 10**18),
        ("1e6", 10**6),
        ("1Pi", 1 << 50),
    ],
)
def test_a_quantity_is_its_bytes(quantity: int | str, size: int) -> None:
    assert whole_bytes(quantity) == size


@pytest.mark.parametrize("text", ["", "Mi", "-1", "1mi", "1 Mi", "1m", "big", "1e", "1.2.3"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity of bytes, such as 512Mi"):
        whole_bytes(text)


@given(st.integers(0, 1 << 60))
def test_a_whole_number_is_itself(number: int) -> None:
    assert whole_bytes(number) == whole_bytes(str(number)) == number


@given(st.from_regex(re.compile(SIZE_PATTERN, re.ASCII), fullmatch=True))
def test_what_the_api_server_takes_is_a_number_of_bytes(text: str) -> None:
    assert whole_bytes(text) >= 0


@pytest.mark.parametrize("text", ["2000000000m", "+16Mi", "-16Mi", "1e+7", "16mi", "Mi", ""])
def test_the_api_server_refuses_what_is_none(text: str) -> None:
    assert re.search(SIZE_PATTERN, text) is None


@pytest.mark.parametrize("text", ["16777216", "64Mi", "1.5Gi", "20M", "1024Ki"])
def test_the_api_server_takes_usual_sizes(text: str) -> None:
    assert re.search(SIZE_PATTERN, text) is not None
