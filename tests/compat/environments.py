"""Environments of the combinations, made by uv and kept in the cache until their locks change."""

import fcntl
import hashlib
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tests.compat.combinations import Combination

_EXTRAS: Final = ("monitor", "worker", "verl", "megatron")
_SECONDS: Final = 3600.0  # several GB of wheels the first time
_MADE: Final = ".made"  # written last: an environment without this file is incomplete


@dataclass(frozen=True)
class Maker:
    """Makes environments.

    Attributes:
        uv: the program.
        python: the interpreter of every environment.
        cache: folder of the environments.
    """

    uv: Path
    python: Path
    cache: Path

    def environment(self, combination: Combination) -> Path:
        """The combination's interpreter, in an environment that is made if missing."""
        digest = hashlib.sha256(combination.lock.read_bytes() + str(self.python).encode())
        place = self.cache / f"{combination.name}-{digest.hexdigest()[:12]}"
        python = place / "bin" / "python"
        self.cache.mkdir(parents=True, exist_ok=True)
        # Two checkouts may need the same environment.
        with place.with_suffix(place.suffix + ".lock").open("w") as lock:
            _take(lock)
            if not (place / _MADE).exists():
                print(f"Making {place} (2 min when the wheels are cached)", flush=True)
                self._uv("venv", "--clear", "--python", str(self.python), str(place))
                # Without bytecode every rank of every test would compile torch and verl anew.
                self._uv(
                    "pip", "sync", "--compile-bytecode",
                    "--python", str(python), str(combination.lock),
                )  # fmt: skip
                (place / _MADE).touch()
        return python

    def write_lock(self, combination: Combination) -> None:
        """Resolve the versions of ``uv.lock`` with the combination's changes."""
        extras = [word for extra in _EXTRAS for word in ("--extra", extra)]
        with tempfile.TemporaryDirectory() as folder:
            overrides, resolved = Path(folder) / "overrides.txt", Path(folder) / "resolved.txt"
            overrides.write_text("\n".join(combination.overrides) + "\n")
            # uv prefers the versions that its output file has already.
            self._uv(
                "export", "--frozen", "--no-hashes", "--no-emit-project", *extras,
                "--output-file", str(resolved),
            )  # fmt: skip
            self._uv(
                "pip", "compile", "--no-annotate", *extras, "--group", "dev",
                "--python-version", "3.11", "--python-platform", "x86_64-unknown-linux-gnu",
                "--custom-compile-command", "python -m tests.compat --lock",
                "--override", str(overrides), "--output-file", str(resolved), "pyproject.toml",
            )  # fmt: skip
            combination.lock.write_text(resolved.read_text())

    def _uv(self, *words: str) -> None:
        subprocess.run([self.uv, words[0], "--quiet", *words[1:]], check=True, timeout=_SECONDS)


def _take(lock: IO[str]) -> None:
    """Raises `TimeoutError` if another checkout holds the lock too long."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{lock.name} was held for {_SECONDS:.0f} s") from None
            time.sleep(1)  # flock has no timeout
        else:
            return
