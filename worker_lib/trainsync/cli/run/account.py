"""``trainsync run account``."""

from rich.console import Console
from rich.table import Table

from trainsync.api import words
from trainsync.api.status import AccountClass, AccountStatus, AccountUnit
from trainsync.cli.options import AsJson
from trainsync.cli.output.console import emit, guarded, say, stdout
from trainsync.cli.output.tables import new_table
from trainsync.cli.output.text import cell
from trainsync.cli.run import report as reports
from trainsync.cli.run.cluster import ClusterClient
from trainsync.cli.run.kubeconfig import KubeconfigOptions
from trainsync.cli.run.options import Context, Kubeconfig, Name, Namespace, with_cluster
from trainsync.cli.run.report import RunReport


@guarded
def account(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_json: AsJson = False,
) -> None:
    """Say where the seconds of a run's GPUs went: each is in exactly one class.

    In a run without GPUs seconds of pods are counted.
    """
    target = KubeconfigOptions(namespace, context, kubeconfig)
    report = with_cluster(target, lambda cluster: _look(cluster, name))
    found = report.status.account
    if as_json:
        shown = None if found is None else found.to_json_dict()
        emit({"name": report.name, "namespace": report.namespace, "account": shown})
    elif found is None:
        say(f"nothing of run {report.name} is accounted for yet: that begins with its first report")
    else:
        show(found, stdout())


async def _look(cluster: ClusterClient, name: str) -> RunReport:
    return reports.read(await cluster.run(name))


def show(found: AccountStatus, console: Console) -> None:
    """Print an account: a sentence, and a table of classes and roles."""
    whose = "GPUs" if found.unit is AccountUnit.GPU else "pods"
    since = words.clock(found.since)
    console.print(
        f"goodput {found.goodput:.1%} of all seconds of {whose} since {since} UTC", highlight=False
    )
    console.print(_table(found))


def _table(found: AccountStatus) -> Table:
    table = new_table()
    table.add_column("class")
    for role in found.roles:
        table.add_column(role.role, justify="right", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
    for kind in AccountClass:
        if not any(kind.value in role.classes for role in found.roles):
            continue
        row = [kind.value]
        for role in found.roles:
            seconds = role.classes.get(kind.value)
            if seconds is None:  # not of this role
                row += ["", ""]
            else:
                row += [words.duration(seconds), f"{seconds / max(role.seconds, 1):.1%}"]
        table.add_row(*row)
    total = ["all"]
    for role in found.roles:
        total += [words.duration(role.seconds), "100.0%"]
    table.add_row(*(cell(text) for text in total))
    return table
