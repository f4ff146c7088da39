"""What a way of weights to an SGLang server does: the same calls for each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from trainsync.weights.errors import SchemaMismatchError
from trainsync.weights.staging.index import StagedIndex

SGLangRoute = Literal["disk", "tensor", "distributed"]


@dataclass(frozen=True)
class ServerFacts:
    """What a way asks of a server's ``/server_info``.

    Attributes:
        ranks: tensor parallel ranks, each of which takes the weights.
        started: how long its parts took to start, to the nanosecond, which tells one process from
            the next; None: unknown.
    """

    ranks: int
    started: object

    @staticmethod
    def of_one_engine(info: Mapping[str, Any], route: SGLangRoute) -> "ServerFacts":
        """The facts.

        Raises:
            SchemaMismatchError: the server has parts that SGLang does not update by this route.
        """
        for name, what in (
            ("dp_size", "data parallel replicas"),
            ("pp_size", "pipeline stages"),
            ("nnodes", "nodes"),
        ):
            count = info.get(name, 1)
            if count != 1:
                raise SchemaMismatchError(
                    f"the server has {count} {what}, which are not updated by route {route}: "
                    "choose disk"
                )
        ranks = info.get("tp_size", 1)
        if not isinstance(ranks, int) or ranks < 1:
            raise SchemaMismatchError(f"the server names {ranks!r} as its tp_size")
        return ServerFacts(ranks, info.get("startup_time"))


class LaidVersion(Protocol):
    """A version that is ready to be loaded."""

    def load(self, tag: str, deadline: float) -> None:
        """Let the server, which is paused, load the version, flush its cache and name it ``tag``.

        Raises:
            ServerError: it did not; with `KEPT` in its message where its weights are as they were.
        """
        ...

    def close(self) -> None:
        """Give back what was laid."""
        ...


class Route(Protocol):
    """A way of weights to one server. One thread."""

    def lay(
        self,
        index: StagedIndex,
        tensors: Mapping[str, torch.Tensor],
        info: Mapping[str, Any],
        deadline: float,
    ) -> LaidVersion:
        """Do what can be done while the server serves.

        Args:
            index: of the staged version.
            tensors: those of its tensors that the server takes.
            info: the server's ``/server_info``.

        Raises:
            WeightsError, MergeError: it cannot be done; the server has the weights that it had.
        """
        ...

    def close(self) -> None:
        """Let go of what is kept from version to version; the server stays as it is."""
        ...
