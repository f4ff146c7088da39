"""One thing done for many items in several threads; the first failure stops all."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class _StoppedError(Exception):
    """Another thread failed, or the caller was interrupted."""


def for_each(
    items: Iterable[T],
    work: Callable[[T, Callable[[], None]], None],
    threads: int,
    name: str = "copy",
) -> None:
    """Call ``work`` with every item, and with a function that raises once it shall stop.

    The threads are daemons: a process that ends meanwhile does not wait for the rest.

    Args:
        name: of the threads, after ``trainsync-``.

    Raises:
        What ``work`` raised first, when all threads have stopped.
    """
    stop = threading.Event()
    todo = list(items)
    left = iter(todo)  # a list's iterator gives every item once, to whichever thread asks
    failures: list[BaseException] = []

    def go_on() -> None:
        if stop.is_set():
            raise _StoppedError

    def run() -> None:
        try:
            for item in left:
                go_on()
                work(item, go_on)
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
            stop.set()

    workers = [
        threading.Thread(target=run, name=f"trainsync-{name}-{number}", daemon=True)
        for number in range(min(threads, len(todo)))
    ]
    started: list[threading.Thread] = []
    try:
        for worker in workers:
            worker.start()
            started.append(worker)
        _wait(started)
    finally:  # also on Ctrl-C: the threads stop after the block at hand
        stop.set()
        _wait(started)
    if failures:
        raise failures[0]


def _wait(workers: Iterable[threading.Thread]) -> None:
    for worker in workers:
        worker.join()
