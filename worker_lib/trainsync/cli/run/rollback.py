"""``trainsync run rollback``."""

import asyncio
from datetime import UTC, datetime
from typing import Annotated

import typer

from trainsync.api.base import format_time
from trainsync.api.status import RollbackState, RollbackStatus
from trainsync.cli.options import AsJson
from trainsync.cli.output.console import REFUSED, CommandError, emit, guarded, say
from trainsync.cli.run import following
from trainsync.cli.run import report as reports
from trainsync.cli.run.cluster import ClusterClient
from trainsync.cli.run.following import PollTimes
from trainsync.cli.run.kubeconfig import KubeconfigOptions
from trainsync.cli.run.options import Context, Kubeconfig, Name, Namespace, with_cluster
from trainsync.cli.run.report import RunReport


@guarded
def rollback(
    invocation: typer.Context,
    name: Name,
    step: Annotated[int, typer.Option("--step", min=0, help="A committed checkpoint's step.")],
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_json: AsJson = False,
) -> None:
    """Let a run begin a new attempt from an older checkpoint, and wait for the monitor's answer.

    Sets spec.resumeFrom. Later steps are set aside in rolled_back/ of the run's directory or
    bucket, and are not deleted. A step that is not committed is refused, and the run goes on as it
    is.
    """
    target = KubeconfigOptions(namespace, context, kubeconfig)
    pace = PollTimes.of(invocation)
    answer = with_cluster(target, lambda cluster: _roll_back(cluster, name, step, pace))
    if answer.state is RollbackState.REFUSED:
        raise CommandError(f"refused, and the run goes on as it is: {answer.message}", REFUSED)
    if as_json:
        emit(answer.to_json_dict())
    else:
        say(f"{answer.state.value.lower()}: {answer.message}")


async def _roll_back(
    cluster: ClusterClient, name: str, step: int, pace: PollTimes
) -> RollbackStatus:
    run = reports.read(await cluster.run(name))
    if run.ended:
        raise CommandError(f"run {name} is {run.phase}, and no attempt begins any more", REFUSED)
    request = format_time(datetime.now(UTC))
    await cluster.change_spec(name, {"resumeFrom": {"step": step, "request": request}})

    async def look() -> RunReport:
        return reports.read(await cluster.run(name))

    def answered(run: RunReport) -> bool:
        return _answer(run, step, request) is not None

    try:
        async with asyncio.timeout(pace.answer_seconds):
            run = await following.follow(look, answered, pace)
    except TimeoutError as error:
        raise CommandError(
            f"the monitor of run {name} has not answered within {pace.answer_seconds:g} s, and may"
            " yet: see the condition RolledBack, or remove spec.resumeFrom",
        ) from error
    answer = _answer(run, step, request)
    assert answer is not None, "it was awaited"
    return answer


def _answer(run: RunReport, step: int, request: str) -> RollbackStatus | None:
    checkpoint = run.status.checkpoint
    answer = checkpoint.rollback if checkpoint else None
    return answer if answer and (answer.step, answer.request) == (step, request) else None
