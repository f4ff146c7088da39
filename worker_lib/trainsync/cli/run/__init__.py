"""``trainsync run``: look at a TrainingRun in its cluster, and let it go back to a checkpoint.

Begin at the module of a command (`status`, `events`, `timeline`, `account`, `prove`, `rollback`);
`cluster` is the one client of the API server, `report` reads a run's status, `screen` prints it.
"""

import typer

from trainsync.cli.run import account, events, prove, rollback, status, timeline
from trainsync.cli.run.options import RUN_EXIT_CODES
from trainsync.cli.run.prove import PROVE_EXIT_CODES

app = typer.Typer(
    help="A TrainingRun in its cluster. Needs a kubeconfig; only rollback changes anything.",
    epilog=RUN_EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # paragraphs of docstrings are wrapped anew
)

app.command("status", epilog=RUN_EXIT_CODES)(status.status)
app.command("events", epilog=RUN_EXIT_CODES)(events.events)
app.command("timeline", epilog=RUN_EXIT_CODES)(timeline.timeline)
app.command("account", epilog=RUN_EXIT_CODES)(account.account)
app.command("prove", epilog=PROVE_EXIT_CODES)(prove.prove)
app.command("rollback", epilog=RUN_EXIT_CODES)(rollback.rollback)
