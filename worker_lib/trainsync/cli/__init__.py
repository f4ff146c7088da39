"""The ``trainsync`` command.

Begin at `app` (what is under it); `run/` looks at a TrainingRun in its cluster, `checkpoints/` at a
run's directory, and `output/` prints.
"""

import sys


def main(program: str = "trainsync") -> None:
    """Entry point; the exit codes are in `trainsync.cli.output.console`."""
    try:
        # Imported here, so that Ctrl-C amid the imports is no traceback either.
        from trainsync.cli.app import app

        app(prog_name=program)
    except KeyboardInterrupt:
        sys.exit(130)


def kubectl_main() -> None:
    """Entry point of ``kubectl-trainsync``: kubectl finds it by its name in PATH."""
    main("kubectl trainsync")
