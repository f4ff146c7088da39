"""What the monitor's process asks of a core, on a volume or in a store: see `MonitorCore`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from trainsync.api.protocol import CommitNotice, ProgressReport, SaveKind
from trainsync.api.spec import ResumeFrom, Role
from trainsync.api.status import RolePods, StopSave
from trainsync.monitor.client.hosted import HostedCore
from trainsync.monitor.ledger.saves import CommittedInfo, SaveOwner
from trainsync.storage.saves.claims import Claim


class ServedCore(HostedCore, Protocol):
    """See `trainsync.monitor.core.core.MonitorCore`, of which all methods are."""

    gpus: float

    @property
    def tells(self) -> bool:
        """Whether `view` is to be shown."""
        ...

    def claim(self, owner: SaveOwner, cluster: str, confirmed_attempt: int | None) -> None:
        """Grant the attempt to this incarnation."""
        ...

    def renew(self, owner: SaveOwner, incarnation: str, reason: str) -> None:
        """Restart the owner's attempt in place."""
        ...

    def resume_from(self, wanted: ResumeFrom | None) -> None:
        """The present ``spec.resumeFrom``."""
        ...

    def check(self, owner: SaveOwner) -> None:
        """Pass if the owner is in force."""
        ...

    def newest_of_run(self, kind: SaveKind) -> tuple[int | None, CommitNotice | None]:
        """The attempt in force, and the newest save of its training."""
        ...

    def newest_published(self) -> int | None:
        """The version that the Synchronizer says was published last; None: it has not said."""
        ...

    def expect(self, step: int | None) -> None:
        """Take over the step that the run's status says was committed last."""
        ...

    def answer_stop(self, owner: SaveOwner, since: datetime | None, step: int | None) -> None:
        """The trainers save ``step`` for the request of ``since``."""
        ...

    def stop_save(self) -> StopSave | None:
        """The state of the save that was asked for last."""
        ...

    def see_pods(self, pods: Mapping[Role, RolePods], phase: str | None) -> None:
        """The run's Ray pods, and its phase, as the operator sees them."""
        ...

    def committed(self) -> list[tuple[SaveKind, CommittedInfo]]:
        """Every committed save, in no order."""
        ...

    def claims(self) -> list[Claim]:
        """The claims of attempts by incarnations, oldest first."""
        ...

    def last_report(self) -> ProgressReport | None:
        """The last progress report as it came."""
        ...
