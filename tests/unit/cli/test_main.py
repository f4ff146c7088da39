import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from trainsync.cli.app import app
from trainsync.cli.output import console
from trainsync.storage.layout import RunDirectory
from typer.testing import CliRunner

from tests.unit.cli.commands import call

COMMAND = (sys.executable, "-c", "from trainsync.cli import main; main()")
COMMANDS = ("ls", "show", "verify", "merge", "prune", "cp", "repair")


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, without a terminal, 80 columns wide."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "COLUMNS"},
    )


def test_help_tells_a_newcomer_where_to_start() -> None:
    text = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "Start here: trainsync run status NAME" in text
    assert "trainsync checkpoints ls DIR" in text
    assert "--install-completion" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_documents_its_exit_codes(command: str) -> None:
    text = " ".join(call(command, "--help").stdout.split())
    for part in ("0 all is well", "1 something is damaged", "2 wrong usage", "3 refused"):
        assert part in text


def test_the_version_is_that_of_the_distribution() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == "trainsync 0.1.0\n"


def test_as_a_plugin_of_kubectl_it_calls_itself_so() -> None:
    code = "import sys; sys.argv[1:] = ['run', '--help']; import trainsync.cli as c"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; c.kubectl_main()"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Usage: kubectl trainsync run" in done.stdout


def test_a_shell_can_complete_commands_and_options() -> None:
    # Click finds the variable by the program's name.
    code = "from trainsync.cli.app import app; app(prog_name='trainsync')"
    for words, expected in (
        ("checkpoints ", "verify"),
        ("checkpoints verify --", "--threads"),
        ("run ", "timeline"),
    ):
        line = f"trainsync {words}"
        env = {
            "_TRAINSYNC_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | env,
        )
        assert expected in done.stdout.split()


def test_the_command_loads_nothing_heavy(run: RunDirectory) -> None:
    code = (
        "import sys; from trainsync.cli.app import app\n"
        f"try: app(['checkpoints', 'verify', {str(run.root)!r}])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'kubernetes', 'aiohttp', 'fastapi', 'obstore'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_a_terminal_output_is_plain_and_no_wider_than_80_columns(run: RunDirectory) -> None:
    done = run_command("checkpoints", "verify", run.root)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "…" not in done.stdout
    assert "0 damaged, 0 leftovers" in done.stderr


@pytest.mark.parametrize("arguments", [("ls",), ("show", "20", "--json"), ("show", "20")])
def test_a_reader_that_has_gone_is_no_traceback_and_no_damage(
    run: RunDirectory, arguments: tuple[str, ...]
) -> None:
    first, *rest = arguments
    words = ["checkpoints", first, str(run.root), *rest]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, *words], stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 130


def test_an_error_with_brackets_is_printed_as_it_is(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "stderr", lambda: Console(stderr=True, width=80))
    odd = run.root / "[red]"
    odd.mkdir()
    (odd / "x").touch()
    assert "[red] is not the directory of a run" in call("ls", odd).stderr.replace("\n", "")
