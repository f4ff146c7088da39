"""``make release-check``: build and check everything that a release consists of."""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from release import build
from release.contents import check_wheel, wheel_files
from release.errors import ReleaseError
from release.versions import agreed_version, stated_versions

_ROOT = Path(__file__).parent.parent
_OUTPUT = _ROOT / "build/release"
_LEAN = "import sys, trainsync; assert not {'torch', 'ray'} & set(sys.modules)"


def main() -> int:
    """Run every check; 0 when the release may go out."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--uv", type=Path, default=Path(shutil.which("uv") or "uv"))
    try:
        _check(parser.parse_args().uv)
    except ReleaseError as error:
        _say(f"release-check: {error}")
        return 1
    return 0


def _check(uv: Path) -> None:
    version = agreed_version(stated_versions(_ROOT))
    _say(f"version {version}, everywhere")
    shutil.rmtree(_OUTPUT, ignore_errors=True)
    _OUTPUT.mkdir(parents=True)

    wheel = build.build_python(uv, _ROOT, _OUTPUT)
    counts = check_wheel(wheel_files(wheel))
    _say(f"{wheel.name}: " + ", ".join(f"{part} {n}" for part, n in sorted(counts.items())))

    with tempfile.TemporaryDirectory(prefix="trainsync-release-") as scratch:
        lean = build.install(uv, _ROOT, Path(scratch) / "lean", wheel)
        build.run(lean / "trainsync", "--help", root=_ROOT)
        said = build.run(lean / "trainsync", "--version", root=_ROOT).strip()
        if said != f"trainsync {version}":
            raise ReleaseError(f"`trainsync --version` says {said!r}")
        build.run(lean / "python", "-I", "-c", _LEAN, root=_ROOT)
        full = build.install(uv, _ROOT, Path(scratch) / "full", wheel, "[operator,monitor]")
        build.run(full / "trainsync-operator", "--help", root=_ROOT)
        build.run(full / "python", "-I", "-c", "import trainsync.monitor.server.routes", root=_ROOT)
    _say("installed alone and with [operator,monitor], each in an empty environment; both start")

    chart = build.package_chart(_helm(), _ROOT, _OUTPUT)
    _say(f"{chart.name}: linted and packaged")
    sbom, parts = build.list_parts(uv, _ROOT, _OUTPUT, version)
    _say(f"{sbom.name}: {parts} parts")
    _write_sums()
    _say(f"All of it is in {_OUTPUT.relative_to(_ROOT)}")


def _helm() -> Path:
    if found := shutil.which("helm"):
        return Path(found)
    _say("helm: of the development cluster's programs (built the first time)")
    # Its progress goes to stderr, for the person at the terminal.
    done = subprocess.run(
        [sys.executable, "-m", "devcluster", "tools"], cwd=_ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise ReleaseError("the development cluster's programs could not be built")
    return Path(done.stdout.strip()) / "helm"


def _write_sums() -> None:
    """SHA256SUMS of what was built, for ``sha256sum --check``."""
    files = sorted(
        path for path in _OUTPUT.iterdir() if path.suffix in {".whl", ".gz", ".tgz", ".json"}
    )
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (_OUTPUT / "SHA256SUMS").write_text("".join(lines))


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the result, for the person at the terminal


if __name__ == "__main__":
    sys.exit(main())
