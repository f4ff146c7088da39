"""The explorers that follow a trainer, as the trainer sees them over their links."""

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from trainsync.weights.errors import MemberLostError
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import (
    Challenge,
    Frame,
    Link,
    NotProvenError,
    TrainerEndpoint,
)
from trainsync.weights.transports.chain.chain import ChainAddress

logger = logging.getLogger(__name__)

_ACCEPT_SECONDS = 0.2  # how long `close` may have to wait for the listening thread
_MAX_QUARANTINED = 1000
_MAX_UNPROVEN = 64  # connections at once that have not shown the secret yet; each has a thread


@dataclass(eq=False)
class Member:
    """One connected explorer."""

    name: str
    link: Link
    attempt: int  # of the version that it serves; -1 with none
    version: int  # that it serves; -1 with none
    address: ChainAddress  # of the listener for the member before it in a chain
    started: int = 0  # when its receiver was made, in ns since the epoch
    schema: str | None = None  # digest of the schema that it holds
    same_host: bool = False  # the explorer maps this process's shared memory
    serves: str | None = None  # digest of the served version, from the answer to `prepare`
    group: Frame | None = None  # the process group that it can join; see `process_group.offer`
    answers: dict[int, Frame] = field(default_factory=dict)

    def behind(self, attempt: int, version: int) -> bool:
        """Whether the member serves an older version. Versions of a newer attempt count anew."""
        return (self.attempt, self.version) < (attempt, version)


def _family(host: str) -> socket.AddressFamily:
    """IPv6 where explorers can reach ``host`` by nothing else."""
    try:
        found = {info[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:  # explorers may resolve the name all the same
        return socket.AF_INET
    return socket.AF_INET6 if found == {socket.AF_INET6} else socket.AF_INET


class Members:
    """Listens for explorers, and knows those that are connected, and why others are gone.

    Args:
        attempt: of this trainer.
        host: the address at which explorers reach this process.
        token: the attempt's secret; connections that do not know it are refused.
    """

    def __init__(
        self, attempt: int, host: str, port: int, deadlines: Deadlines, token: str
    ) -> None:
        self.attempt = attempt
        self._token = token
        self._refused = 0
        self._unproven = 0
        self._deadlines = deadlines
        self._changed = threading.Condition()
        self._members: dict[str, Member] = {}
        self._quarantined: dict[str, str] = {}
        self._newer_attempt: int | None = None
        self._rounds = itertools.count(1)
        self._closing = threading.Event()
        self._listener = socket.create_server(("", port), family=_family(host), backlog=512)
        self._listener.settimeout(_ACCEPT_SECONDS)
        self.endpoint = TrainerEndpoint(host, self._listener.getsockname()[1], attempt, token)
        self._thread = threading.Thread(target=self._listen, name="trainsync-members", daemon=True)
        self._thread.start()

    @property
    def newer_attempt(self) -> int | None:
        """The attempt that has taken over, if an explorer told of one."""
        return self._newer_attempt

    @property
    def refused_connections(self) -> int:
        """How many connections were refused: they did not prove that they know the secret, or
        there were too many at once.
        """
        return self._refused

    def connected(self) -> list[Member]:
        """The connected members, in the order of their names."""
        with self._changed:
            return [self._members[name] for name in sorted(self._members)]

    def quarantined(self) -> dict[str, str]:
        """Explorers that were connected and are gone, and the cause."""
        with self._changed:
            return dict(self._quarantined)

    def here(self, member: Member) -> bool:
        """Whether this connection of the member is still up."""
        with self._changed:
            return self._members.get(member.name) is member

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for ``condition()``, which is called at each change; False after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def quarantine(self, member: Member, cause: str) -> None:
        """End the member's connection. The explorer may connect again."""
        member.link.close(cause)
        self._remove(member, cause)

    def tell(self, members: Collection[Member], frame: Frame) -> None:
        """Send to each; members that cannot be reached are quarantined."""
        for member in members:
            try:
                member.link.send(frame)
            except MemberLostError as error:
                self.quarantine(member, str(error))

    def ask(self, requests: Mapping[Member, Frame], seconds: float) -> dict[Member, Frame]:
        """Each member's answer; one that is lost, or silent for ``seconds``, is quarantined."""
        number = next(self._rounds)
        deadline = time.monotonic() + seconds
        for member, frame in requests.items():
            self.tell([member], {**frame, "round": number})

        def settled() -> bool:
            return all(number in m.answers or not self.here(m) for m in requests)

        self.wait(settled, max(0.0, deadline - time.monotonic()))
        answered = {m: m.answers.pop(number) for m in requests if number in m.answers}
        for member in requests:
            if member not in answered:
                self.quarantine(member, f"it did not answer within {seconds:.3g} s")
        return answered

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._closing.set()
        self._thread.join(_ACCEPT_SECONDS * 10)
        for member in self.connected():
            self.quarantine(member, "the trainer has ended")

    def _listen(self) -> None:
        with self._listener:
            while not self._closing.is_set():
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # no file descriptors, say: the next one may do
                    logger.warning("an explorer could not connect: %s", error)
                    self._closing.wait(_ACCEPT_SECONDS)
                    continue
                self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Give the connection a thread, if there are not too many already."""
        with self._changed:
            full = self._unproven >= _MAX_UNPROVEN
            if full:
                self._refused += 1
            else:
                self._unproven += 1
        if full:
            logger.warning("a connection is refused: %d others prove themselves", _MAX_UNPROVEN)
            connection.close()
            return
        try:
            link = Link(connection, self._deadlines.silence)
            threading.Thread(
                target=self._serve, args=(link,), name="trainsync-member", daemon=True
            ).start()
        except (OSError, RuntimeError) as error:  # no more threads, say: the next one may do
            logger.warning("an explorer could not connect: %s", error)
            connection.close()
            self._settle()

    def _settle(self) -> None:
        """Count one connection less among those that have not proven the secret."""
        with self._changed:
            self._unproven -= 1

    def _serve(self, link: Link) -> None:
        member = None
        cause = "it was not accepted"
        try:
            challenge = Challenge(link, self._token)
            try:
                hello = challenge.hello(self._deadlines.connect)
            finally:
                self._settle()  # before the answer, after which the explorer may connect anew
            member = self._greet(link, challenge, hello)
            if member is not None:
                greeted = member
                cause = link.run(lambda frame: self._on_frame(greeted, frame))
        except NotProvenError as error:
            cause = str(error)
            self._refuse(link, cause)
        except (MemberLostError, KeyError, TypeError, ValueError) as error:
            cause = f"it sent frames of another protocol ({type(error).__name__}: {error})"
            self._refuse(link, cause)
        finally:
            link.close(cause)
            if member is not None:
                self._remove(member, cause)
            link.discard()

    def _refuse(self, link: Link, cause: str) -> None:
        with self._changed:
            self._refused += 1
        logger.warning("a connection from %s is refused: %s", link.peer, cause)
        with contextlib.suppress(MemberLostError):
            link.send({"kind": "refused", "cause": cause})

    def _greet(self, link: Link, challenge: Challenge, hello: Frame) -> Member | None:
        seen = int(hello["seen_attempt"])
        if seen > self.attempt:
            logger.error("explorer %s follows attempt %d already", hello["name"], seen)
            with self._changed:
                self._newer_attempt = max(seen, self._newer_attempt or seen)
                self._changed.notify_all()
            link.send({"kind": "refused", "cause": f"attempt {seen} has taken over"})
            return None
        if self._outlived(str(hello["name"]), int(hello["started"])):
            link.send({"kind": "refused", "cause": f"a newer process is explorer {hello['name']}"})
            return None
        schema = hello["schema"]
        member = Member(
            name=str(hello["name"]),
            link=link,
            attempt=int(hello["attempt"]),
            version=int(hello["version"]),
            started=int(hello["started"]),
            address=(link.peer, int(hello["port"])),
            schema=None if schema is None else str(schema),
            group=_offer(hello.get("group")),
        )
        challenge.welcome({"kind": "welcome", "attempt": self.attempt})
        with self._changed:
            if self._closing.is_set() or self._outlived(member.name, member.started):
                return None
            former = self._members.get(member.name)
            self._members[member.name] = member
            self._quarantined.pop(member.name, None)
            self._changed.notify_all()
        if former is not None:
            former.link.close("it connected again")
        return member

    def _outlived(self, name: str, started: int) -> bool:
        """Whether a process that was started later is connected under this name."""
        known = self._members.get(name)
        return known is not None and known.started > started

    def _on_frame(self, member: Member, frame: Frame) -> None:
        if frame["kind"] != "answer":
            return
        with self._changed:
            member.answers[int(frame["round"])] = frame
            self._changed.notify_all()

    def _remove(self, member: Member, cause: str) -> None:
        with self._changed:
            if self._members.get(member.name) is not member:
                return
            del self._members[member.name]
            if len(self._quarantined) >= _MAX_QUARANTINED:
                del self._quarantined[next(iter(self._quarantined))]
            self._quarantined[member.name] = cause
            self._changed.notify_all()
        if not self._closing.is_set():
            logger.warning("explorer %s is quarantined: %s", member.name, cause)


def _offer(said: object) -> Frame | None:
    """The process group that an explorer offers besides the chain; None: no group."""
    return said if isinstance(said, dict) else None
