"""``trainsync checkpoints cp``."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from trainsync.api.words import clean
from trainsync.cli.checkpoints.places import (
    DirectoryPlace,
    StorePlace,
    open_bucket,
    open_place,
    refuse_options,
)
from trainsync.cli.options import LATEST, AllowHttp, AsJson, Endpoint, Kind, Region, Threads
from trainsync.cli.output.console import DAMAGED, USAGE, emit, fail, guarded, say, stdout
from trainsync.cli.output.progress import bytes_bar
from trainsync.storage.copying.copy import Copied, copy_step
from trainsync.storage.copying.places import Destination, Source
from trainsync.storage.copying.store import StoreDestination, StoreSource
from trainsync.storage.copying.volume import VolumeDestination, VolumeSource
from trainsync.storage.errors import DamagedFileError, FileCheckError
from trainsync.storage.inspect.activity import sign_of_life
from trainsync.storage.inspect.findings import is_run_directory
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects import address
from trainsync.storage.objects.opening import StoreOptions
from trainsync.storage.saves import claims

_FILES_AT_ONCE = 4


@guarded
def copy(
    source: Annotated[
        str, typer.Argument(help="A run's directory, or the URL of a store.", metavar="SOURCE")
    ],
    destination: Annotated[
        str,
        typer.Argument(help="Another one; made if it is missing.", metavar="DESTINATION"),
    ],
    step_name: Annotated[
        str, typer.Option("--step", help="Number of the step, or latest.", metavar="STEP")
    ] = LATEST,
    kind: Kind = None,
    threads: Threads = _FILES_AT_ONCE,
    endpoint: Endpoint = None,
    region: Region = None,
    from_endpoint: Annotated[
        str | None,
        typer.Option(help="Of SOURCE, where both are stores.", metavar="URL"),
    ] = None,
    from_region: Annotated[
        str | None, typer.Option(help="Of SOURCE, where both are stores.")
    ] = None,
    allow_http: AllowHttp = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also while a run seems to be at work in DESTINATION.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a step from a volume to a store, back, or between two of a kind.

    Every byte is compared with the digest in the manifest on its way, and the manifest is
    written last: a copy that is cut off counts for nothing, and is done by the same command again.
    A step that is there already stays as it is. On a volume the step is committed as by a run's
    monitor, and the next attempt resumes from it.
    """
    both = address.is_url(source) and address.is_url(destination)
    if not both and (from_endpoint is not None or from_region is not None):
        fail("--from-endpoint and --from-region are for a copy between two stores", USAGE)
    if not address.is_url(source) and not address.is_url(destination):
        refuse_options(StoreOptions(endpoint, region, allow_http))
    to_options = StoreOptions(endpoint, region, allow_http)
    from_options = StoreOptions(from_endpoint or endpoint, from_region or region, allow_http)
    place = open_place(source, from_options if address.is_url(source) else StoreOptions())
    given: Source
    if isinstance(place, StorePlace):
        given = StoreSource(place.bucket)
    else:
        assert isinstance(place, DirectoryPlace)
        given = VolumeSource(place.run, say)
    step = place.chosen_step(step_name, kind)
    kinds = [there for there in given.kinds(step) if kind in (None, there)]
    if not kinds:
        what = f"step {step}" if kind is None else f"{kind.value} {step}"
        fail(f"{what} is not committed in {place.name}", USAGE)
    taker = _destination(destination, to_options, force=force)
    started = time.monotonic()
    total = 0
    with bytes_bar(f"copying step {step}", None) as tell:

        def on_total(more: int) -> None:
            nonlocal total
            total += more
            tell(0, total)

        try:
            copied = copy_step(
                given, taker, step, kinds, threads=threads, on_total=on_total, on_bytes=tell
            )
        except (FileCheckError, DamagedFileError) as error:
            fail(f"step {step} was not copied to {taker.name}: {error}", DAMAGED)
    if as_json:
        emit(
            {
                "source": place.name,
                "destination": taker.name,
                "step": step,
                "saves": [_as_json(one) for one in copied],
                "seconds": round(time.monotonic() - started, 3),
            }
        )
    else:
        for one in copied:
            stdout().print(clean(_line(one, taker)), markup=False, soft_wrap=True)


def _destination(text: str, options: StoreOptions, *, force: bool) -> Destination:
    if address.is_url(text):
        return StoreDestination(open_bucket(text, options))
    path = Path(text)
    if path.exists() and not path.is_dir():
        fail(f"{path} is a file: give the directory of a run", USAGE)
    run = RunDirectory(path)
    if not is_run_directory(run):
        fail(f"{path} is not the directory of a run, and not empty: give another one", USAGE)
    # Without a claim no run has begun here: what has changed is an earlier copy's doing.
    at_work = None if force or not claims.all_claims(run) else sign_of_life(run, time.time())
    if at_work is not None:
        fail(
            f"a run seems to be at work in {path} ({at_work}): its monitor alone commits there "
            "while it lives. End or suspend the run; use --force if it has ended just now"
        )
    return VolumeDestination(run)


def _as_json(one: Copied) -> dict[str, object]:
    return {
        "kind": one.manifest.kind.value,
        "files": len(one.manifest.files),
        "bytes": one.manifest.bytes,
        "manifestDigest": one.digest,
        "wasThere": one.was_there,
        "seconds": round(one.seconds, 3),
    }


def _line(one: Copied, taker: Destination) -> str:
    what = f"{one.manifest.kind.value} {one.manifest.step}"
    size = decimal(one.manifest.bytes)
    if one.was_there:
        return f"{what} is in {taker.name} already ({size})"
    rate = decimal(int(one.manifest.bytes / max(one.seconds, 1e-3)))
    return (
        f"{what} is now in {taker.name}: {size} in {len(one.manifest.files)} files, "
        f"{one.seconds:.1f} s, {rate}/s"
    )
