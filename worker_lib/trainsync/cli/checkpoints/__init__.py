"""``trainsync checkpoints``: look at, verify, copy and mend what is committed in a run's directory
or in a store.

Begin at the module or folder of a command; `options` beside this package, `places` and `reports`
are shared. Works on the directory or the store alone: no cluster, no monitor, and but for ``merge``
and ``push`` no torch.
"""

import typer

from trainsync.cli.checkpoints import copying, listing, merge, push, show, verify
from trainsync.cli.checkpoints.prune import command as prune
from trainsync.cli.checkpoints.repair import command as repair
from trainsync.cli.output.console import EXIT_CODES

app = typer.Typer(
    help="Committed checkpoints in a run's directory or in object storage. Needs no cluster.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # paragraphs of docstrings are wrapped anew
)

app.command("ls", epilog=EXIT_CODES)(listing.list_saves)
app.command("show", epilog=EXIT_CODES)(show.show)
app.command("verify", epilog=EXIT_CODES)(verify.verify)
app.command("merge", epilog=EXIT_CODES)(merge.merge)
app.command("push", epilog=EXIT_CODES)(push.push)
app.command("prune", epilog=EXIT_CODES)(prune.prune)
app.command("cp", epilog=EXIT_CODES)(copying.copy)
app.command("repair", epilog=EXIT_CODES)(repair.repair)
