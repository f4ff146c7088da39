"""`whole_bytes`: what Kubernetes reads as a quantity of bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.api.quantities import whole_bytes


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
