"""The test results of each combination."""

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.table import Table

from tests.compat.combinations import Combination


@dataclass(frozen=True)
class Result:
    """Test results of one combination.

    Attributes:
        passed, failed, skipped: numbers of tests; failed ones include errors of fixtures.
        seconds: duration of all tests.
    """

    combination: Combination
    passed: int
    failed: int
    skipped: int
    seconds: float

    @property
    def good(self) -> bool:
        """Whether at least one test ran and none failed."""
        return self.passed > 0 and self.failed == 0


def read(combination: Combination, junit: Path) -> Result:
    """Results from pytest's JUnit file; a missing file means that pytest crashed, and counts as
    failed."""
    if not junit.exists():
        return Result(combination, 0, 1, 0, 0.0)
    suites = ElementTree.parse(junit).getroot().iter("testsuite")
    passed = failed = skipped = 0
    seconds = 0.0
    for suite in suites:
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skips = int(suite.get("skipped", 0))
        failed, skipped = failed + bad, skipped + skips
        passed += int(suite.get("tests", 0)) - bad - skips
        seconds += float(suite.get("time", 0))
    return Result(combination, passed, failed, skipped, seconds)


def table(results: list[Result]) -> Table:
    """One line for each combination."""
    table = Table(title="The engines' tests")
    for heading in ("verl", "torch", "passed", "failed", "skipped", "minutes"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.combination.verl,
            result.combination.torch,
            str(result.passed),
            str(result.failed),
            str(result.skipped),
            f"{result.seconds / 60:.1f}",
            style="" if result.good else "red",
        )
    return table
