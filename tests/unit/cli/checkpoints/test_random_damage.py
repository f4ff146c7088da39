"""Any damage to a healthy run's directory is found, or harms nothing that is committed."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trainsync.storage.errors import StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers

from tests.unit.cli.commands import call, document
from tests.unit.cli.conftest import SAVES
from tests.unit.monitor.saves import CHECKPOINT, STATE_DICT

POINTED = {CHECKPOINT: 30, STATE_DICT: 20}


def harm(root: Path, data: st.DataObject) -> None:
    """One thing that disks, people and crashes do."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    folders = sorted(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())
    path = data.draw(st.sampled_from(files), "file")
    what = data.draw(
        st.sampled_from(
            ["flip", "cut", "grow", "remove", "link", "swap", "add", "temporary", "number"]
        ),
        "what",
    )
    if what == "flip" and path.stat().st_size:
        content = bytearray(path.read_bytes())
        bit = data.draw(st.integers(0, len(content) * 8 - 1), "bit")
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
    elif what == "cut":
        os.truncate(path, data.draw(st.integers(0, path.stat().st_size), "size"))
    elif what == "grow":
        path.write_bytes(path.read_bytes() + b"\0")
    elif what == "remove":
        path.unlink()
    elif what == "link":
        path.unlink()
        path.symlink_to("/etc/hostname")
    elif what == "swap":
        other = data.draw(st.sampled_from(files), "other")
        if other != path:
            spare = root / "spare"
            path.rename(spare)
            other.rename(path)
            spare.rename(other)
    elif what == "add":
        (data.draw(st.sampled_from(folders), "folder") / "extra.json").write_bytes(b"{")
    elif what == "temporary":
        (data.draw(st.sampled_from(folders), "folder") / ".x.1a.tmp").touch()
    elif what == "number":
        step = data.draw(st.integers(0, 50), "step")
        (root / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")


def unharmed(run: RunDirectory, digests: dict[object, str]) -> bool:
    """Judged without the code under test: every save and both pointers are as they were."""
    try:
        for step, kind in SAVES:
            found = manifest.read_manifest(run, kind, step)
            manifest.check_manifest(run, found.manifest, with_digest=True)
            if found.digest != digests[step, kind]:
                return False
        return all(pointers.read_pointer(run, kind) == step for kind, step in POINTED.items())
    except (OSError, StorageError):
        return False


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_is_found_or_harmless_and_repair_leaves_no_dangling_pointer(
    healthy: RunDirectory, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("harmed") / "run"
    shutil.copytree(healthy.root, root, symlinks=True)
    run = RunDirectory(root)
    digests: dict[object, str] = {
        (step, kind): manifest.read_manifest(run, kind, step).digest for step, kind in SAVES
    }
    times = data.draw(st.integers(1, 3), "times")
    for _ in range(times):
        harm(root, data)
    result = call("verify", root, "--json")
    assert result.exit_code in (0, 1), result.output
    if not unharmed(run, digests):
        found = document("verify", root, code=result.exit_code)["findings"]
        assert found
        # A pointer that is only behind is told, and harms no save. And who destroys a manifest and
        # the record of its commit has made of a save one that was never committed: told, too.
        behind = "pointer_behind" in [f["code"] for f in found]
        assert result.exit_code == 1 or behind or times > 1
    repaired = call("repair", root, "--digest")
    assert repaired.exit_code in (0, 3), repaired.output
    if repaired.exit_code == 0:
        codes = {f["code"] for f in document(
            "verify", root, code=call("verify", root).exit_code)["findings"]}  # fmt: skip
        assert not codes & {"pointer", "pointer_dangling", "pointer_behind"}
    shutil.rmtree(root.parent)
