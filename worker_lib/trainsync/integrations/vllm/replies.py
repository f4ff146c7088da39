"""Replies of vLLM's workers to a call that some of them fail in.

vLLM 0.32 reads one reply of each worker, and stops at the first failure. The replies of the workers
behind stay in their queues, where each is taken for one to the next call: from then on a failure of
such a worker is told one call late, and a call that all have done is said to have failed.
"""

import time
from collections.abc import Callable
from typing import Any, Final

_QUEUES: Final = "response_mqs"
_DEADLINE: Final = "deadline"
_FUTURE: Final = "FutureWrapper"


class _Queue:
    """One worker's replies, of which a call takes one.

    Args:
        queue: of vLLM.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.is_asked = False

    def dequeue(self, *arguments: Any, **named: Any) -> Any:
        """The worker's reply, as vLLM asks for it. Raises `TimeoutError`: none comes in time."""
        self.is_asked = True
        return self._queue.dequeue(*arguments, **named)


def reading_all(get_response: Callable[[], Any]) -> Callable[[], Any]:
    """The same function, which also takes the replies behind the first failure.

    Args:
        get_response: of vLLM's `MultiprocExecutor.collective_rpc`, a closure over the queues that
            the call reads; any other function comes back as it is.
    """
    names = getattr(getattr(get_response, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(get_response, "__closure__", None) or (), strict=True))
    if not {_QUEUES, _DEADLINE} <= cells.keys():
        return get_response
    queues = [_Queue(queue) for queue in cells[_QUEUES].cell_contents]
    cells[_QUEUES].cell_contents = queues
    deadline: float | None = cells[_DEADLINE].cell_contents

    def read() -> Any:
        try:
            return get_response()
        except Exception:
            for queue in queues:
                if not queue.is_asked:
                    # As long as vLLM itself would have waited, had no worker failed.
                    rest = None if deadline is None else max(0.0, deadline - time.monotonic())
                    queue.dequeue(timeout=rest)
            raise

    return read


def read_all_replies(executors: Any) -> None:
    """Let calls of this process's executor take all replies; a second time changes nothing.

    Args:
        executors: vLLM's module ``vllm.v1.executor.multiproc_executor``.
    """
    future = getattr(executors, _FUTURE, None)
    if future is None or getattr(future, "reads_all", False):
        return

    class ReadsAll(future):  # type: ignore[misc, valid-type]  # vLLM's, looked up
        """A call whose replies are all taken."""

        reads_all = True

        def __init__(
            self, futures_queue: Any, get_response: Callable[[], Any], *more: Any, **named: Any
        ) -> None:
            super().__init__(futures_queue, reading_all(get_response), *more, **named)

    setattr(executors, _FUTURE, ReadsAll)
