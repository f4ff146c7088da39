"""The wrapper against a program that behaves as kubectl does at its worst."""

import json
import os
import time
from pathlib import Path

import pytest

from demo.errors import DemoError, KubectlError
from demo.kubectl import Kubectl, wait_for


def fake(tmp_path: Path, script: str) -> Kubectl:
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    return Kubectl(program, tmp_path / "kubeconfig")


def event(kind: str, step: int) -> str:
    return json.dumps(
        {"type": kind, "object": {"step": step, "name": "größer"}}, ensure_ascii=False
    )


def test_a_failure_tells_the_command_and_its_output(tmp_path: Path) -> None:
    kubectl = fake(tmp_path, "echo no such thing >&2; exit 3")
    with pytest.raises(KubectlError, match=r"kubectl get it.*exit code 3: no such thing"):
        kubectl.run("get", "it")


def test_a_command_that_hangs_ends_at_its_deadline(tmp_path: Path) -> None:
    kubectl = fake(tmp_path, "sleep 60")
    with pytest.raises(KubectlError, match="did not end within"):
        kubectl.run("get", timeout=0.2)


def test_a_watch_yields_every_document_however_it_is_cut(tmp_path: Path) -> None:
    text = (event("ADDED", 1) + "\n" + event("MODIFIED", 2) + event("DELETED", 3)).encode()
    cut = text.index("ß".encode()) + 1  # in the middle of a character
    (tmp_path / "first").write_bytes(text[:cut])
    (tmp_path / "rest").write_bytes(text[cut:])
    kubectl = fake(tmp_path, f"cat {tmp_path}/first; sleep 0.2; cat {tmp_path}/rest; sleep 60")
    seen = list(kubectl.watch("thing", "x", "ns", seconds=20))
    assert [found["step"] for found in seen] == [1, 2]
    assert {found["name"] for found in seen} == {"größer"}


def test_a_watch_that_the_server_ends_is_started_again(tmp_path: Path) -> None:
    script = f"""
case "$*" in
  *--watch*)
    echo x >> {tmp_path}/calls
    if [ $(wc -l < {tmp_path}/calls) = 1 ]; then echo '{event("ADDED", 1)}'
    else echo '{event("ADDED", 2)}'; echo '{event("DELETED", 2)}'; fi;;
  *) echo '{{}}';;
esac"""
    seen = list(fake(tmp_path, script).watch("thing", "x", "ns", seconds=20))
    assert [found["step"] for found in seen] == [1, 2]


def test_a_watch_ends_at_its_deadline_and_leaves_no_process(tmp_path: Path) -> None:
    kubectl = fake(tmp_path, f"echo $$ > {tmp_path}/pid; echo '{event('ADDED', 1)}'; exec sleep 60")
    began = time.monotonic()
    with pytest.raises(KubectlError, match="thing ns/x did not end within 1 s"):
        list(kubectl.watch("thing", "x", "ns", seconds=1))
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_waiting_in_vain_says_for_what() -> None:
    with pytest.raises(DemoError, match="in vain for a miracle"):
        wait_for(lambda: None, what="a miracle", seconds=0.1)
