"""The rights of the chart's roles, against what the other tests here made the API server log.

These tests come last (see conftest).
"""

from pathlib import Path

import pytest

from demo.platform import own_cluster
from devcluster.registry import read_record
from tests.cluster.audit import MONITOR, OPERATOR, Request, requests, rights
from tests.cluster.conftest import BEGAN

# Where tests/cluster/test_cli_run.py tries what a monitor may do nowhere but at home.
TRIED = (MONITOR, "default")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def asked(kubeconfig: str) -> list[Request]:
    """All requests of operators and monitors since the tests began."""
    record = None if own_cluster(kubeconfig) else read_record(Path(kubeconfig).parent.name)
    if record is None or not record.cluster.audit_log.exists():
        pytest.skip("this cluster has no audit log of ours")
    return list(dict.fromkeys(requests(record.cluster.audit_log, BEGAN)))


def test_nothing_is_asked_for_without_a_right(asked: list[Request]) -> None:
    # The binding of an account may go a moment before its pod: of these, rights of the role alone.
    known = {(one.account, one.namespace) for one in asked if one.allowed}
    unlawful = {
        str(one)
        for one in asked
        if not one.allowed
        and (one.part, one.namespace) != TRIED
        and ((one.account, one.namespace) not in known or not one.used <= rights(one.part))
    }
    assert unlawful == set()


def test_no_kind_is_listed_whole_in_one_answer(asked: list[Request]) -> None:
    """Of a large cluster such a list takes longer than a request may."""
    assert {str(one) for one in asked if one.allowed and one.whole} == set()


@pytest.mark.parametrize("part", [OPERATOR, MONITOR])
def test_every_right_is_used(
    part: str, asked: list[Request], request: pytest.FixtureRequest
) -> None:
    here = {item.path for item in request.session.items}
    missing = sorted(
        file.name for file in Path(__file__).parent.rglob("test_*.py") if file not in here
    )
    if missing or request.config.option.keyword or request.session.testsfailed:
        pytest.skip(f"a part of the tests ran, or one failed: without {missing}")
    used = {right for one in asked if one.part == part and one.allowed for right in one.used}
    assert rights(part) - used == set()
