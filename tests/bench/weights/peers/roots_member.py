"""A member of `bench_roots`.

``python -m tests.bench.weights.peers.roots_member NAME HOST PORT TOTAL``.
Each line of its input names the next way; the member answers with a line.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from tests.bench.weights.peers.gloo_group import GlooGroup, Seat, host_store

SECONDS: Final = 200.0
IN_FLIGHT: Final = 2  # buckets on the wire at once: gloo's default number of parallel collectives
BUCKET_SIZE: Final = 16 << 20
TRAINERS: Final = ("t0", "t1")
RECEIVERS: Final = ("r0", "r1")
GROUPS: Final = {
    "gather": ("t1", "t0"),  # the first member is the root
    "all": ("t0", *RECEIVERS),
    "half0": ("t0", *RECEIVERS),
    "half1": ("t1", *RECEIVERS),
}


class Member:
    """A member's groups, and the memory of the whole model."""

    def __init__(self, name: str, host: str, port: int, total: int, address: str) -> None:
        self.name = name
        self.model = torch.full((total,), TRAINERS.index(name) + 1 if name in TRAINERS else 0)
        self.model = self.model.to(torch.uint8)
        self.groups: dict[str, GlooGroup] = {}
        for group, members in GROUPS.items():
            if name in members:
                seat = Seat(port, members.index(name), len(members), host, group)
                self.groups[group] = GlooGroup(seat, SECONDS, address)

    def half(self, number: int) -> Iterator[torch.Tensor]:
        """The buckets of a trainer rank's half."""
        middle = self.model.numel() // 2
        return iter(self.model[number * middle : (number + 1) * middle].split(BUCKET_SIZE))

    def stream(self, group: str, parts: Iterator[torch.Tensor]) -> Callable[[], bool]:
        """Send or receive ``parts``; each call waits for one part, and returns True after the
        last."""
        flying: deque[Any] = deque()

        def post() -> None:
            part = next(parts, None)
            if part is not None:
                flying.append(self.groups[group].broadcast(part))

        for _ in range(IN_FLIGHT):
            post()

        def advance() -> bool:
            if flying:
                flying.popleft().wait()
                post()
            return not flying

        return advance

    def one(self) -> None:
        """Rank 0 gathers rank 1's half, bucket by bucket, and sends the whole model."""
        if self.name == "t1":
            _finish(self.stream("gather", self.half(1)))
        elif self.name == "t0":
            coming = self.stream("gather", self.half(1))
            sending = self.stream("all", self._gathered(coming))
            _finish(sending)
        else:
            both = (part for number in (0, 1) for part in self.half(number))
            _finish(self.stream("all", both))

    def every(self) -> None:
        """Each trainer rank sends its half."""
        streams = [
            self.stream(f"half{number}", self.half(number))
            for number, rank in enumerate(TRAINERS)
            if self.name in (rank, *RECEIVERS)
        ]
        while streams:
            streams = [advance for advance in streams if not advance()]

    def _gathered(self, coming: Callable[[], bool]) -> Iterator[torch.Tensor]:
        """Rank 0's half, while rank 1's half arrives, and then rank 1's half."""
        yield from self.half(0)
        for part in self.half(1):
            coming()
            yield part


def _finish(advance: Callable[[], bool]) -> None:
    while not advance():
        pass


def main() -> None:
    """Run until the input ends; then check the receiver's model."""
    name, host, port, total, address = sys.argv[1:]
    torch.set_num_threads(1)
    store = host_store(SECONDS, int(port)) if name == TRAINERS[0] else None
    member = Member(name, host, int(port), int(total), address)
    ways = {"one": member.one, "every": member.every}
    print("ready", flush=True)
    for line in sys.stdin:
        if name in RECEIVERS:
            member.model.zero_()
        ways[line.strip()]()
        middle = member.model.numel() // 2
        whole = bool((member.model[:middle] == 1).all() and (member.model[middle:] == 2).all())
        print("done" if name in TRAINERS or whole else "damaged", flush=True)
    del store


if __name__ == "__main__":
    main()
