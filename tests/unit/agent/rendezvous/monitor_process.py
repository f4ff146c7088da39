"""A monitor to be killed, started with ``PORT DIRECTORY KEY``."""

import sys
from pathlib import Path

from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer


def main(port: int, directory: Path, key: Path) -> None:
    monitor = RunningMonitor(FakeApi(Signer(private=key.read_bytes())), directory, port=port)
    sys.stdin.read()  # until the test ends
    monitor.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
