"""`VLLMEngine` and `AsyncVLLMEngine` with the real ``LLM`` and ``AsyncLLM``."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.vllm.conftest import APART, TOLERANCE
from tests.vllm.support.server import ROOT, START_SECONDS, environment, vllm_environment
from tests.vllm.support.tiny_model import Reference, version_of


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_vllm_generates_with_each_version_that_it_was_given(
    kind: str, model: Path, tmp_path: Path
) -> None:
    versions = [version_of(model, 61), version_of(model, 62)]
    files = [tmp_path / f"{number}.safetensors" for number in range(len(versions))]
    for weights, file in zip(versions, files, strict=True):
        save_file(weights, file)
    script = ROOT / "tests" / "vllm" / "scripts" / "in_process.py"
    process = subprocess.Popen(
        [vllm_environment() / "bin" / "python", script, kind, model, *files],
        env=environment(tmp_path / "plugin"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=START_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in output.splitlines() if line.startswith("ANSWER ")]
    assert len(lines) == len(versions), output[-8000:]
    for number, line in enumerate(lines):
        version, tokens, said = json.loads(line.removeprefix("ANSWER "))
        assert version == str(number)
        for other, weights in enumerate(versions):
            wanted = Reference(model, weights, tmp_path / f"{number}-{other}").logprobs(tokens)
            off = max(abs(a - b) for a, b in zip(said, wanted, strict=True))
            assert off < TOLERANCE if other == number else off > APART
