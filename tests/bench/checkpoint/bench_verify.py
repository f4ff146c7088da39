"""Speed of ``trainsync checkpoints verify``, against only reading the same files.

Both read with the same number of threads and the same block size, in turn, from a cold page cache
(the files' pages are dropped before each) and from a warm one. The figure is the cold ratio: users
verify checkpoints that are old or larger than memory. The warm ratio, where the hash competes only
with a copy from the page cache, is in the details.
"""

import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.cli.app import app
from trainsync.cli.options import DEFAULT_THREADS
from trainsync.storage import atomic
from trainsync.storage.digest import file_digest
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers
from trainsync.storage.saves.receipts import FileEntry, Participant
from typer.testing import CliRunner

from tests.bench.harness import Figure, seconds, spread

FILES = 8
FILE_BYTES = 256 << 20
BLOCK = 512 << 10
ROUNDS = 8  # even: each is first equally often


def commit(run: RunDirectory) -> list[Path]:
    """A committed checkpoint of 2 GiB in 8 shards, durable, so that its pages can be dropped."""
    actor = run.step(1) / "actor"
    atomic.make_directory(actor)
    paths = [actor / f"model_world_size_{FILES}_rank_{rank}.pt" for rank in range(FILES)]
    for path in paths:
        with path.open("wb") as file:
            for _ in range(FILE_BYTES // (64 << 20)):
                file.write(os.urandom(64 << 20))
            file.flush()
            os.fsync(file.fileno())
    manifest.write_manifest(
        run,
        manifest.Manifest(
            kind=SaveKind.CHECKPOINT,
            step=1,
            attempt=0,
            incarnation="benchmark0",
            run_uid="local",
            created_at=datetime.now(UTC),
            participants=tuple(Participant("model", rank) for rank in range(FILES)),
            files=tuple(
                FileEntry(f"actor/{path.name}", FILE_BYTES, file_digest(path)) for path in paths
            ),
        ),
    )
    pointers.move_pointer(run, SaveKind.CHECKPOINT, 1)
    return paths


def drop(paths: list[Path]) -> None:
    """Drop the files' pages from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read(paths: list[Path]) -> None:
    """Only read the files."""

    def one(path: Path) -> None:
        buffer = bytearray(BLOCK)
        fd = os.open(path, os.O_RDONLY)
        with os.fdopen(fd, "rb", buffering=0) as file:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(DEFAULT_THREADS) as pool:
        list(pool.map(one, paths))


def verify(directory: Path) -> None:
    """The whole command, without the start of Python."""
    result = CliRunner().invoke(app, ["checkpoints", "verify", str(directory)])
    if result.exit_code != 0:
        raise RuntimeError(result.output)


def run() -> list[Figure]:
    """`verify_vs_read`: the median of the rounds' ratios, from a cold page cache."""
    times: dict[str, list[float]] = {
        f"{what}_{cache}": [] for cache in ("cold", "warm") for what in ("read", "verify")
    }
    with tempfile.TemporaryDirectory(prefix="trainsync-bench-") as name:
        directory = RunDirectory(Path(name))
        paths = commit(directory)
        for cache in ("cold", "warm"):
            read(paths)
            for number in range(ROUNDS):
                calls = {"read": lambda: read(paths), "verify": lambda: verify(directory.root)}
                for what in sorted(calls, reverse=number % 2 == 1):
                    if cache == "cold":
                        drop(paths)
                    times[f"{what}_{cache}"].append(seconds(calls[what]))
    ratios = {
        cache: [
            r / v for r, v in zip(times[f"read_{cache}"], times[f"verify_{cache}"], strict=True)
        ]
        for cache in ("cold", "warm")
    }
    return [
        Figure(
            name="verify_vs_read",
            figure=statistics.median(ratios["cold"]),
            unit="ratio of bytes per second",
            goal=">= 0.8",
            peer="readinto of the same files with as many threads, both from a cold page cache",
            details={
                "bytes": FILES * FILE_BYTES,
                "threads": DEFAULT_THREADS,
                "rounds": ROUNDS,
                "warm_ratio": statistics.median(ratios["warm"]),
                **{
                    f"{cache}_ratio_of_minima": min(times[f"read_{cache}"])
                    / min(times[f"verify_{cache}"])
                    for cache in ratios
                },
                **{
                    key: value
                    for what, found in times.items()
                    for key, value in spread(f"{what}_seconds", found).items()
                },
            },
        )
    ]
