"""The Ray actor that knows which objects of the weights' store lie in Ray's object store.

It has no promise to keep: when it ends, with the explorer that made it, another one is made and
begins with nothing.
"""

import asyncio
import time
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainsync.weights.transports.anchors.pool.offers import Offers, ReadAction

ACTOR_NAME: Final = "trainsync-weights-objects"
_CALLS: Final = 1000
_LOOK_SECONDS: Final = 1.0  # for a reader that has gone silent
_EXPIRE_SECONDS: Final = 60.0


class ObjectPool:
    """See the module. Its methods are asynchronous calls of one event loop.

    Handles are lists with one `ray.ObjectRef`, since Ray resolves a bare one.
    """

    def __init__(self) -> None:
        self._offers = Offers()
        self._changed = asyncio.Condition()
        self._expires = False

    async def take(self, key: str, explorer: str, seconds: float) -> tuple[str, Any]:
        """What the explorer is to do, as `ReadAction`, within ``seconds``; see `Offers.take`."""
        deadline = time.monotonic() + seconds
        while True:
            action, handle = self._offers.take(key, explorer, time.monotonic())
            left = deadline - time.monotonic()
            if action is not ReadAction.WAIT or left <= 0:
                return action.value, handle
            async with self._changed:
                try:
                    wait = min(left, _LOOK_SECONDS)
                    await asyncio.wait_for(self._changed.wait(), wait)
                except TimeoutError:
                    continue

    async def heard(self, key: str, explorer: str) -> None:
        """The reader still reads."""
        self._offers.heard(key, explorer, time.monotonic())

    async def give(self, key: str, handle: list[Any], size: int, most: int) -> None:
        """See `Offers.give`."""
        self._offers.give(key, handle, size, most, time.monotonic())
        if not self._expires:
            self._expires = True
            asyncio.get_running_loop().call_later(_EXPIRE_SECONDS, self._expire)
        await self._tell()

    async def give_up(self, key: str, explorer: str) -> None:
        """See `Offers.give_up`."""
        self._offers.give_up(key, explorer)
        await self._tell()

    async def forget(self, key: str, object_id: str) -> None:
        """The object of that id could not be had: its owner has ended, say."""
        handle = self._offers.handle(key)
        if handle is not None and handle[0].hex() == object_id:
            self._offers.forget(key)

    def _expire(self) -> None:
        self._expires = self._offers.expire(time.monotonic())
        if self._expires:
            asyncio.get_running_loop().call_later(_EXPIRE_SECONDS, self._expire)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def find_or_make(namespace: str) -> Any:
    """The handle of the namespace's pool in this Ray cluster, which is made if there is none.

    It runs on the node of this process, which is there.

    Raises:
        ray.exceptions.RayError, ValueError: Ray does not make it.
    """
    node = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(ObjectPool)
        .options(
            name=ACTOR_NAME,
            namespace=namespace,
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote()
    )
