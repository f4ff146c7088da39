"""What keeps two local monitors of one directory apart, where there is no Lease."""

import os
import re

from trainsync.monitor.errors import FencedError, NotReadyError
from trainsync.storage.layout import RunDirectory


class ClaimGate:
    """Closed for good once any process has claimed a newer attempt in the run's directory.

    Asked before every change of what is committed, so that the monitor of an older attempt whose
    processes live on (or wake up) stops. It reads names alone: a claim is durable before the newer
    attempt saves anything.

    Args:
        run_uid: claims of other runs do not count.
    """

    def __init__(self, run: RunDirectory, run_uid: str, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._passed: list[str] = []
        self._name = re.compile(rf"^{re.escape(run_uid)}-(0|[1-9][0-9]*)-.+\.json$")

    def __call__(self) -> None:
        """Pass while no newer attempt is claimed.

        Raises:
            FencedError: one is.
            NotReadyError: that cannot be told now.
        """
        try:
            names = os.listdir(self._run.claims)  # noqa: PTH208 - names are wanted, not paths
        except FileNotFoundError:
            return
        except OSError as error:
            raise NotReadyError(f"the run's claims cannot be read: {error}") from error
        if names == self._passed:  # asked a hundred times for each save
            return
        claimed = [int(match[1]) for name in names if (match := self._name.match(name))]
        newest = max(claimed, default=self._attempt)
        if newest > self._attempt:
            raise FencedError(
                f"attempt {self._attempt} is over: attempt {newest} is claimed in {self._run.root}"
            )
        self._passed = names
