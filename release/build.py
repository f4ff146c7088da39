"""Making the parts of a release with the programs that make them: uv, helm, cyclonedx-py."""

import json
import os
import subprocess
import sys
from pathlib import Path

from release.errors import ReleaseError

_DEADLINE = 600.0
_CHART = Path("charts/trainsync-operator")


def run(*command: str | Path, root: Path, env: dict[str, str] | None = None) -> str:
    """The output of a command that is run in ``root``.

    Raises:
        ReleaseError: it fails, or takes longer than ten minutes.
    """
    shown = " ".join(str(word) for word in command)
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=os.environ | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_DEADLINE,
        )
    except subprocess.TimeoutExpired as error:
        raise ReleaseError(f"`{shown}` took longer than {_DEADLINE:.0f} s") from error
    if done.returncode != 0:
        raise ReleaseError(f"`{shown}` ended with {done.returncode}:\n{done.stdout.strip()}")
    return done.stdout


def build_python(uv: Path, root: Path, output: Path) -> Path:
    """Build sdist and, from it, the wheel; the wheel's path."""
    run(uv, "build", "--quiet", "--out-dir", output, root=root)
    (wheel,) = output.glob("*.whl")
    return wheel


def install(uv: Path, root: Path, environment: Path, wheel: Path, extras: str = "") -> Path:
    """Install the wheel and the locked versions of what it needs; the environment's programs."""
    locked = environment.with_suffix(".txt")
    locked.write_text(_locked(uv, root))
    run(
        uv,
        "venv",
        "--quiet",
        "--python",
        sys.executable,
        environment,
        root=root,
    )
    python = environment / "bin/python"
    wanted = f"{wheel}{extras}"
    run(
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        "--constraint",
        locked,
        wanted,
        root=root,
    )
    return environment / "bin"


def package_chart(helm: Path, root: Path, output: Path) -> Path:
    """Lint and package the chart; the package's path."""
    run(helm, "lint", "--strict", "--quiet", _CHART, root=root)
    run(helm, "package", _CHART, "--destination", output, root=root)
    (package,) = output.glob("*.tgz")
    return package


def list_parts(uv: Path, root: Path, output: Path, version: str) -> tuple[Path, int]:
    """Write the list of parts (SBOM, CycloneDX JSON) of everything locked; its path and length.

    Raises:
        ReleaseError: it lacks a package of the lock.
    """
    locked = _locked(uv, root)
    requirements = output / "locked.txt"
    requirements.write_text(locked)
    environment = {"UV_PROJECT_ENVIRONMENT": str(root / ".venv-release")}
    run(uv, "sync", "--frozen", "--quiet", "--only-group", "release", root=root, env=environment)
    sbom = output / f"trainsync-{version}.cdx.json"
    program = root / ".venv-release/bin/cyclonedx-py"
    run(
        program, "requirements", requirements, "--pyproject", root / "pyproject.toml",
        "--output-reproducible", "--output-file", sbom, root=root,
    )  # fmt: skip
    requirements.unlink()
    listed = {part["name"].lower() for part in json.loads(sbom.read_text())["components"]}
    wanted = {line.partition("==")[0].lower() for line in locked.splitlines() if "==" in line}
    if missing := sorted(wanted - listed):
        raise ReleaseError(f"the list of parts lacks {', '.join(missing)}")
    return sbom, len(listed)


def _locked(uv: Path, root: Path) -> str:
    """Every package of the lock that a user may get, with its version, as requirements."""
    return run(
        uv, "export", "--frozen", "--quiet", "--no-dev", "--all-extras", "--no-emit-project",
        "--no-hashes", "--no-header", "--no-annotate", root=root,
    )  # fmt: skip
