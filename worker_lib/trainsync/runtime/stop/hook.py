"""``python3 -m trainsync.runtime.stop.hook SECONDS``: the preStop command of pods in a queue.

The queue takes the pods without a word to the run, and the kubelet sends SIGTERM when this command
ends. Meanwhile the operator has asked the trainers to save: it ends when that save is committed,
when there is nothing to wait for, or after SECONDS. It imports nothing heavy, since it delays the
end of every pod.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trainsync.api import env

_UNKNOWN_SECONDS: Final = 20.0
"""The operator needs so long at most to notice that the pods are taken: its next leader, too."""
_AWAY_SECONDS: Final = 3.0
"""A monitor that is away so long is gone with its run."""
_BACK_SECONDS: Final = 60.0
"""Longest silence of a monitor that has asked to wait: its pod may be made again."""
_POLL_SECONDS: Final = 0.5
_REQUEST_SECONDS: Final = 5.0
_REFUSED: Final = (400, 401, 403, 404, 410)
_NOT_READY: Final = 503  # it begins
# As the library's client: the user's proxy does not know the monitor.
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, token_file: Path | None, refused: str = "go") -> str:
    """The monitor's word: wait, unknown or go; ``refused`` where it refuses, or is older.

    Raises:
        OSError: it cannot be reached.
    """
    request = urllib.request.Request(f"{url}/v1/farewell")  # noqa: S310 - the operator's URL
    if token_file is not None:
        request.add_header("Authorization", f"Bearer {token_file.read_text().strip()}")
    try:
        with _DIRECT.open(request, timeout=_REQUEST_SECONDS) as answer:
            return str(json.load(answer)["state"])
    except urllib.error.HTTPError as error:
        if error.code in _REFUSED:
            return refused
        if error.code == _NOT_READY:
            return "unknown"
        raise


def wait(
    seconds: float,
    question: Callable[[], str],
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait as the monitor says, ``seconds`` at most; returns why it ended."""
    began = heard = monotonic()
    waited = False
    while (now := monotonic()) - began < seconds:
        try:
            state = question()
            heard = now
        except (OSError, ValueError, KeyError):
            state = "away"
        if state == "go":
            return "nothing is to be waited for"
        if state == "wait":
            waited = True
        elif state == "away":
            if now - heard >= (_BACK_SECONDS if waited else _AWAY_SECONDS):
                return "the monitor is away"
        elif waited:
            return "the request is over"
        elif now - began >= _UNKNOWN_SECONDS:
            return "no save was asked for"
        sleep(_POLL_SECONDS)
    return f"{seconds:g} s are over"


def main() -> int:
    """Run the command line of the preStop hook."""
    url, token = os.environ.get(env.MONITOR_URL), os.environ.get(env.TOKEN_FILE)
    if url is None or len(sys.argv) != 2:
        return 0
    file = Path(token) if token else None
    wait(float(sys.argv[1]), lambda: ask(url, file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
