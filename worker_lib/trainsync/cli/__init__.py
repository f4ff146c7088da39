"""The ``trainsync`` command."""

import sys


def main() -> None:
    """Entry point; the exit codes are in `trainsync.cli.console`."""
    try:
        # Imported here, so that Ctrl-C amid the imports is no traceback either.
        from trainsync.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
