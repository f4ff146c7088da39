"""A folder of plain files in a store, such as a model; no save of a run.

Nothing is renamed there, so one file counts: the folder is whole when that one is there, which is
put last. A marker keeps a second writer from the prefix meanwhile, also where the first was killed.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from trainsync.storage.objects import keys
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectExistsError, StoreError
from trainsync.storage.objects.probe import require_conditional_puts
from trainsync.storage.parallel import for_each

MARKER: Final = "trainsync-is-writing"
_BLOCK: Final = 1 << 20

_LOG = logging.getLogger(__name__)


class FolderTakenError(StoreError):
    """There is something under the prefix already."""


def require_empty(bucket: ObjectBucket) -> None:
    """See that a folder may be put under the prefix.

    Raises:
        FolderTakenError: says what is there.
        StoreError: it cannot be listed.
    """
    names = [info.key for info in bucket.objects("")]
    if MARKER in names:
        raise FolderTakenError(
            f"another process writes to {bucket.name}, or was killed there: once it has ended "
            "remove what it put, or give another prefix"
        )
    names += [folder for folder in bucket.folders("") if folder != keys.PROBES]
    if names:
        raise FolderTakenError(f"{bucket.name} is not empty ({names[0]}); expected a new prefix")


def put_folder(
    bucket: ObjectBucket,
    folder: Path,
    files: Sequence[str],
    last: str,
    *,
    threads: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Put ``files`` of ``folder`` under the prefix, and ``last``, which is small, at the end.

    Before ``last`` is put, a failure removes what was put, as far as the store lets it.

    Args:
        files: relative paths; ``last`` is among them.
        threads: files that are put at once.
        on_bytes: told how many more bytes are done, from several threads.

    Raises:
        FolderTakenError: there is something already.
        UnconditionalStoreError: two writers could both win there.
        StoreError, OSError: the store refuses or cannot be reached; a file cannot be read.
    """
    require_empty(bucket)
    require_conditional_puts(bucket)
    try:
        bucket.create(MARKER, secrets.token_hex(16).encode())
    except ObjectExistsError:
        raise FolderTakenError(f"another process writes to {bucket.name}") from None
    others = sorted(
        (name for name in files if name != last), key=lambda name: -(folder / name).stat().st_size
    )

    def put(name: str, go_on: Callable[[], None]) -> None:
        def tell(count: int) -> None:
            go_on()
            on_bytes(count)

        path = folder / name
        bucket.upload(name, _blocks(path, tell), path.stat().st_size)

    try:
        for_each(others, put, threads)
    except BaseException:
        _remove(bucket, [*others, MARKER])
        raise
    # From here on nothing is taken back: the put may be done though its reply was lost.
    bucket.create(last, (folder / last).read_bytes())
    _remove(bucket, [MARKER])


def _blocks(path: Path, tell: Callable[[int], None]) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            tell(len(block))
            yield block


def _remove(bucket: ObjectBucket, names: Sequence[str]) -> None:
    try:
        bucket.delete(names)
    except StoreError as error:
        _LOG.warning("%s: some objects stay there", error)
