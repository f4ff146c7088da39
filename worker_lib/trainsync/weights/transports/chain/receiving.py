"""The explorer's end of a chain: it lets in the member before, and takes the stream from it."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.layout import Bucket, pieces_of, plan_buckets
from trainsync.weights.buckets.served import StagingSet
from trainsync.weights.delta.codec import Segment
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.errors import GroupFailedError, MemberLostError
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import Challenge, Frame, Link, NotProvenError
from trainsync.weights.transports.chain.chain import Chain, chain_token, join_next
from trainsync.weights.transports.chain.delta_wire import receive_segments

logger = logging.getLogger(__name__)

_MAX_UNPROVEN: Final = 16  # connections at once that have not shown the secret; each has a thread


class ChainListener:
    """Listens for as long as a trainer is followed. `admit` is for one thread.

    Args:
        address: of this host, on which to listen.
        token: the trainer's secret.
        seconds: for a connecting member to prove that it knows the secret.
    """

    def __init__(self, address: str, token: str, seconds: float) -> None:
        self.token = token
        self._seconds = seconds
        self._changed = threading.Condition()
        self._unproven = 0
        self._expected = ""  # the chain whose member is let in
        self._arrived: tuple[Link, Challenge] | None = None
        self._closed = False
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name="trainsync-listener", daemon=True).start()

    def admit(self, name: str, seconds: float) -> socket.socket:
        """The connection of the member before, in the chain of this name.

        Raises:
            GroupFailedError: it did not come within ``seconds``.
        """
        with self._changed:
            self._expected = name
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._arrived is not None or self._closed, seconds)
            arrived, self._arrived, self._expected = self._arrived, None, ""
        if arrived is None:
            raise GroupFailedError(f"the member before did not come within {seconds:.3g} s")
        link, challenge = arrived
        try:
            challenge.welcome({"kind": "welcome"})
            return link.detach()
        except MemberLostError as error:
            link.discard()
            raise GroupFailedError(f"the member before is gone: {error}") from error

    def close(self) -> None:
        """Let no member in any more."""
        with self._changed:
            self._closed = True
            arrived, self._arrived = self._arrived, None
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        if arrived is not None:
            arrived[0].discard()

    def _listen(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if not self._closed:
                        logger.warning("a member could not connect: %s", error)
                        time.sleep(0.2)  # no file descriptors, say: not to ask in a busy loop
                    continue
                self._prove_beside(connection)

    def _prove_beside(self, connection: socket.socket) -> None:
        with self._changed:
            full = self._unproven >= _MAX_UNPROVEN
            self._unproven += not full
        if full:
            logger.warning("a connection is refused: %d others prove themselves", _MAX_UNPROVEN)
            connection.close()
            return
        try:
            threading.Thread(
                target=self._prove, args=(connection,), name="trainsync-prove", daemon=True
            ).start()
        except (OSError, RuntimeError) as error:  # no more threads, say: the next one may do
            logger.warning("a member could not connect: %s", error)
            connection.close()
            with self._changed:
                self._unproven -= 1

    def _prove(self, connection: socket.socket) -> None:
        link = Link(connection, self._seconds)
        kept = False
        try:
            kept = self._keep(link)
        except (NotProvenError, MemberLostError) as error:
            logger.warning("a connection from %s is refused: %s", link.peer, error)
        finally:
            with self._changed:
                self._unproven -= 1
            if not kept:
                link.discard()

    def _keep(self, link: Link) -> bool:
        """Whether it is the member that is waited for, or will be within the time for a proof.

        It may come before this explorer has been told of the chain.
        """
        deadline = time.monotonic() + self._seconds
        challenge = Challenge(link, lambda hello: chain_token(self.token, str(hello.get("chain"))))
        name = str(challenge.hello(self._seconds)["chain"])
        with self._changed:
            expected = self._changed.wait_for(
                lambda: self._closed or (self._expected == name and self._arrived is None),
                max(0.0, deadline - time.monotonic()),
            )
            if self._closed or not expected:
                return False
            self._arrived = link, challenge
            self._changed.notify_all()
            return True


class ChainReceiver:
    """Takes part in the chains that the trainer makes. One thread."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._chain: Chain | None = None

    def receive(self, listener: ChainListener, frame: Frame, staged: StagingSet) -> str:
        """Fill ``staged`` as the ``receive`` frame says; returns the digest of what came.

        Raises:
            GroupFailedError: `leave` must be called then.
        """
        deadline = time.monotonic() + float(frame["seconds"])
        chain = self._join(listener, frame, deadline)
        return receive_stream(chain, staged, int(frame["bucket_size"]), deadline)

    def receive_delta(
        self, listener: ChainListener, frame: Frame, plan: Sequence[Bucket]
    ) -> Iterator[Segment]:
        """The segments of a delta, as they come; see `receive_segments`.

        Raises:
            GroupFailedError: `leave` must be called then.
        """
        deadline = time.monotonic() + float(frame["seconds"])
        chain = self._join(listener, frame, deadline)
        yield from receive_segments(chain, plan, deadline)

    def ready_for_delta(self, *, wait: bool) -> bool:
        """Whether one can be applied: what that needs is compiled in the background.

        Args:
            wait: for it, for as long as a bucket may take.

        Raises:
            DeltaError: as `prepare`.
        """
        return prepare(self._deadlines.bucket if wait else 0.0)

    def leave(self) -> None:
        """Give the chain up, if there is one."""
        if self._chain is not None:
            self._chain.close()
            self._chain = None

    def _join(self, listener: ChainListener, frame: Frame, deadline: float) -> Chain:
        name, address = str(frame["chain"]), frame["next"]
        if self._chain is not None and self._chain.name == name:
            return self._chain
        self.leave()
        failpoint("receive.joining")
        end = min(deadline, time.monotonic() + self._deadlines.connect)
        after = None
        if address is not None:  # the member before is let in when the chain is complete behind it
            left = max(0.001, end - time.monotonic())
            after = join_next((str(address[0]), int(address[1])), listener.token, name, left)
        try:
            before = listener.admit(name, max(0.001, end - time.monotonic()))
        except BaseException:
            if after is not None:
                after.close()
            raise
        self._chain = Chain(name, before, after, self._deadlines.bucket)
        failpoint("receive.joined")
        return self._chain


def receive_stream(
    chain: Chain,
    staged: StagingSet,
    bucket_size: int,
    deadline: float,
) -> str:
    """Fill ``staged``, and pass it on; returns the digest of what came.

    Raises:
        GroupFailedError: not all came, or not all of those behind have it.
    """
    hasher = xxhash.xxh3_128()
    data = staged.data.numpy().data
    for bucket in plan_buckets(staged.schema, bucket_size):
        chain.begin_bucket(deadline)
        for piece in pieces_of(data[bucket.start : bucket.stop]):
            chain.carry(piece)
            hasher.update(piece)
        failpoint("receive.bucket")
    chain.confirm(deadline)
    return f"xxh3-128:{hasher.hexdigest()}"
