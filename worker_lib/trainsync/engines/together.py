"""Several things that may have failed, told as one error."""

from collections.abc import Callable


def raise_first(*checks: Callable[[], None]) -> None:
    """Run every check; raise the first one's error, with the others' as its notes: they have one
    cause mostly."""
    failures = []
    for check in checks:
        try:
            check()
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)
    if not failures:
        return
    for other in failures[1:]:
        failures[0].add_note(f"also: {other}")
    raise failures[0]
