"""RunContext of a local run: claiming, joining, reporting, resuming."""

import asyncio
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync.checkpoint.errors import CoordinatorClosedError, ForkedError, UnguardedError
from trainsync.checkpoint.save.registration import Participants
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.errors import ClaimRefusedError
from trainsync.runtime.context import RunContext
from trainsync.runtime.errors import JoinError, SettingsError
from trainsync.runtime.reporting import progress_report
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.claims import LOCAL_UID, read_claims

from tests.waiting import eventually


def local(directory: Path, **environ: str) -> RunContext:
    return RunContext.from_env(directory, environ=environ)


def test_every_start_of_a_local_run_is_the_next_attempt(tmp_path: Path) -> None:
    attempts = []
    incarnations = set()
    for _ in range(3):
        with local(tmp_path / "run") as context:
            attempts.append(context.attempt)
            incarnations.add(context.incarnation)
    assert attempts == [0, 1, 2]
    assert len(incarnations) == 3
    claims = read_claims(RunDirectory(tmp_path / "run"), LOCAL_UID)
    assert [claim.attempt for claim in claims] == attempts


def test_a_process_with_the_contexts_environment_joins_its_attempt(tmp_path: Path) -> None:
    with local(tmp_path / "run", TRAINSYNC_CHECKPOINT_INTERVAL="7") as driver:
        joined = RunContext.from_env(environ=driver.env())
        assert (joined.attempt, joined.incarnation) == (driver.attempt, driver.incarnation)
        assert (joined.directory, joined.checkpoint) == (driver.directory, driver.checkpoint)
        assert joined.run == driver.run == "run"
        assert len(read_claims(RunDirectory(driver.directory), LOCAL_UID)) == 1


def test_a_pickled_context_speaks_for_the_same_attempt(tmp_path: Path) -> None:
    with local(tmp_path / "run") as driver:
        driver.report(1)
        actor: RunContext = pickle.loads(pickle.dumps(driver))
        assert (actor.attempt, actor.incarnation) == (driver.attempt, driver.incarnation)
        actor.coordinator(rank=0, world_size=1).save_sync("model", {"lr": 0.1}, 3)
        asyncio.run(
            driver.coordinator().register_and_monitor(
                3, checkpoint_participants=[("model", 0)], timeout=30
            )
        )
        assert actor.resume() == driver.resume()


def test_a_process_that_joins_says_which_rank_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "TRAINSYNC_RANK", "TRAINSYNC_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with local(tmp_path / "run") as driver:
        actor: RunContext = pickle.loads(pickle.dumps(driver))
        with pytest.raises(JoinError, match=r"coordinator\(rank=..., world_size=...\)"):
            actor.coordinator()
        with pytest.raises(JoinError, match="which rank"):
            actor.coordinator(rank=0)
        made = actor.coordinator(rank=1, world_size=2)
        assert (made.rank, made.world_size) == (1, 2)
        for prefix, rank in (("", "1"), ("TRAINSYNC_", "2")):  # the latter wins
            monkeypatch.setenv(f"{prefix}RANK", rank)
            monkeypatch.setenv(f"{prefix}WORLD_SIZE", "4")
            said = actor.coordinator()
            assert (said.rank, said.world_size) == (int(rank), 4)
        monkeypatch.setenv("TRAINSYNC_RANK", "4")
        with pytest.raises(SettingsError, match="TRAINSYNC_RANK is '4'"):
            actor.coordinator()
        monkeypatch.delenv("TRAINSYNC_RANK")
        with pytest.raises(SettingsError, match="come together"):
            actor.coordinator()


def test_the_process_that_claimed_alone_is_rank_0_of_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "TRAINSYNC_RANK", "TRAINSYNC_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with local(tmp_path / "run") as driver:
        made = driver.coordinator()
        assert (made.rank, made.world_size) == (0, 1)


def test_an_attempt_that_another_process_holds_is_refused(tmp_path: Path) -> None:
    with local(tmp_path / "run") as first:
        stolen = LocalMonitorClient(
            first.directory, attempt=first.attempt, incarnation="another000000000"
        )
        with pytest.raises(ClaimRefusedError, match="claimed by incarnation"):
            stolen.claim("local")
        stolen.close()


def test_a_run_that_committed_nothing_has_nothing_to_resume_from(tmp_path: Path) -> None:
    with local(tmp_path / "run") as context:
        assert context.resume() is None


def test_the_next_attempt_resumes_from_the_newest_commit(tmp_path: Path) -> None:
    with local(tmp_path / "run") as context:
        coordinator = context.coordinator()
        for step in (5, 10):
            coordinator.save_async("model", {"step": step}, step)
            asyncio.run(
                coordinator.register_and_monitor(
                    step, checkpoint_participants=[("model", 0)], timeout=30
                )
            )
        coordinator.save_sync("model", {"step": 15}, 15)  # never registered, never committed
    with local(tmp_path / "run") as context:
        resume = context.resume()
        assert resume is not None
        assert (resume.step, resume.path) == (10, tmp_path / "run/global_step_10")


def test_max_to_keep_of_the_environment_is_what_the_monitor_keeps(tmp_path: Path) -> None:
    with local(tmp_path / "run", TRAINSYNC_CHECKPOINT_MAX_TO_KEEP="2") as context:
        coordinator = context.coordinator()
        for step in range(1, 6):
            coordinator.save_async("model", {"step": step}, step)
            asyncio.run(
                coordinator.register_and_monitor(
                    step, checkpoint_participants=[("model", 0)], timeout=30
                )
            )
        eventually(lambda: RunDirectory(context.directory).steps() == [4, 5])


def test_reports_reach_the_monitor(tmp_path: Path) -> None:
    with local(tmp_path / "run") as context:
        for step in range(1, 51):
            context.report(step, 100, {"reward": step / 100, "loss": float("nan")})
        monitor = context.monitor
        assert isinstance(monitor, LocalMonitorClient)

        def newest() -> bool:
            progress = monitor.view().progress
            return progress is not None and progress.step == 50

        eventually(newest)
        progress = monitor.view().progress
        assert progress is not None
        assert (progress.total_steps, progress.metrics["reward"]) == (100, 0.5)
        eventually(lambda: context.reports.sent + context.reports.superseded == 50)


def test_links_stay_in_later_reports_until_they_change(tmp_path: Path) -> None:
    with local(tmp_path / "run") as context:
        context.report(1, links={"W&B": "https://w.test/1", "MLflow": "http://m.test:5000/a?b=c"})
        context.report(2, links={"W&B": "https://w.test/2"})
        with pytest.raises(ValueError, match="links"):
            context.report(3, links={"W&B": "file:///etc/passwd"})
        context.report(4)
        monitor = context.monitor
        assert isinstance(monitor, LocalMonitorClient)

        def links() -> dict[str, str] | None:
            progress = monitor.view().progress
            return progress.links if progress is not None and progress.step == 4 else None

        expected = {"W&B": "https://w.test/2", "MLflow": "http://m.test:5000/a?b=c"}
        eventually(lambda: links() == expected)


def test_a_report_without_links_is_one_that_an_older_monitor_takes() -> None:
    assert "links" not in progress_report(1, 2, {}).to_json_dict()


def test_the_last_report_is_sent_by_close(tmp_path: Path) -> None:
    context = local(tmp_path / "run")
    context.report(1)
    context.close()
    assert context.reports.sent == 1


def test_a_closed_context_says_so(tmp_path: Path) -> None:
    context = local(tmp_path / "my-run")
    context.close()
    context.close()
    with pytest.raises(JoinError, match="the context of run my-run is closed"):
        context.report(1)


def test_a_wrong_report_is_an_error_at_once(tmp_path: Path) -> None:
    with local(tmp_path / "run") as context:
        with pytest.raises(ValueError, match="step"):
            context.report(-1)
        with pytest.raises(ValueError, match="metrics"):
            context.report(1, metrics={f"m{i}": 0.0 for i in range(65)})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((float("nan"), 2, None), "report: step is nan, expected an integer"),
        (
            (1, 2, {"loss": "low"}),
            r"report: metrics\['loss'\] is a builtins.str, expected a number",
        ),
        ((3, 2, None), "report: step 3 is after the last one, total is 2"),
        ((True, 2, None), "report: step is True, expected an integer"),
        ((1, 2, None, {"W&B": "javascript:x()"}), "report: links are .*, expected at most 8 names"),
        ((1, 2, None, {"": "https://w.test"}), "report: links are .*, expected at most 8 names"),
    ],
)
def test_what_a_report_cannot_say_is_refused_in_a_sentence(
    tmp_path: Path, arguments: tuple[Any, ...], expected: str
) -> None:
    with local(tmp_path / "run") as context, pytest.raises(ValueError, match=expected):
        context.report(*arguments)


def test_a_metric_that_is_not_finite_is_sent_and_named_once_while_it_is_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with local(tmp_path / "run") as context:
        for step, loss in enumerate([float("nan"), float("nan"), 0.5, float("inf")]):
            context.report(step, 4, {"loss": loss})
    assert caplog.messages.count("report: metrics['loss'] is nan at step 0") == 1
    assert "report: metrics['loss'] is nan at step 1" not in caplog.messages
    assert caplog.messages.count("report: metrics['loss'] is inf at step 3") == 1


def test_nothing_is_saved_by_a_coordinator_whose_context_is_closed(tmp_path: Path) -> None:
    context = local(tmp_path / "run")
    coordinator = context.coordinator(0, 1)
    context.close()
    for save in (coordinator.save_async, coordinator.save_sync):
        with pytest.raises(CoordinatorClosedError, match=r"model-step1: the context .* is closed"):
            save("model", {"weight": torch.zeros(1)}, 1)
    with pytest.raises(CoordinatorClosedError):
        coordinator.register(1, checkpoint_participants=[("model", 0)])


def test_a_forked_process_is_told_that_the_context_is_its_parents(tmp_path: Path) -> None:
    with local(tmp_path / "run") as context:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for call in (lambda: context.report(1), context.resume, context.close):
                    try:
                        call()
                    except ForkedError as error:
                        os.write(write, f"{error}\n".encode())
            finally:
                os._exit(0)  # it is no second pytest
        os.close(write)
        with os.fdopen(read) as heard:
            lines = heard.read().splitlines()
        os.waitpid(child, 0)
        assert len(lines) == 3
        assert all("was made before this process was forked" in line for line in lines)
        context.report(1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TRAINSYNC_CHECKPOINT_INTERVALL", "TRAINSYNC_CHECKPOINT_INTERVAL"),
        ("TRAINSYNC_MAX_TO_KEEP", "TRAINSYNC_CHECKPOINT_MAX_TO_KEEP"),
        ("TRAINSYNC_SYNC_TIMEOUT", "TRAINSYNC_SYNC_TIMEOUT_SECONDS"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(
    tmp_path: Path, name: str, meant: str
) -> None:
    with pytest.raises(SettingsError, match=f"{name} is set, which is not read: {meant} was meant"):
        local(tmp_path / "run", **{name: "5"})
    with local(tmp_path / "run", TRAINSYNC_OF_MY_OWN="5") as context:
        assert context.attempt == 0


def test_several_ranks_without_a_process_group_are_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(JoinError, match=r"init_process_group before RunContext.from_env"):
        local(tmp_path / "run", WORLD_SIZE="2", RANK="0")


def test_a_synchronizer_without_ray_is_told_what_to_do(tmp_path: Path) -> None:
    with local(tmp_path / "run") as context, pytest.raises(JoinError, match=r"call ray.init\(\)"):
        context.synchronizer()


def test_what_is_due_follows_the_intervals(tmp_path: Path) -> None:
    environ = {"TRAINSYNC_CHECKPOINT_INTERVAL": "5", "TRAINSYNC_SYNC_INTERVAL": "2"}
    with local(tmp_path / "run", **environ) as context:
        steps = range(1, 13)
        assert [s for s in steps if context.should_checkpoint(s, last=12)] == [5, 10, 12]
        assert [s for s in steps if context.should_sync(s)] == [2, 4, 6, 8, 10, 12]


def test_a_coordinator_is_made_as_it_is_asked_for(tmp_path: Path) -> None:
    with local(tmp_path / "run") as context:
        coordinator = context.coordinator(0, 1, overlapped=True)
        with pytest.raises(UnguardedError):
            coordinator.save_async("model", {"w": 1}, 1)
        with pytest.raises(ValueError, match="when_full must be"):
            context.coordinator(0, 1, when_full="drop")  # type: ignore[arg-type]


def test_a_watch_that_a_manager_asked_for_ends_with_the_context(tmp_path: Path) -> None:
    def watching() -> list[str]:
        return [t.name for t in threading.enumerate() if "follow-saves" in t.name]

    before = watching()
    context = local(tmp_path / "run")
    coordinator = context.coordinator(0, 1)
    watch = coordinator.watch()
    watch.register(Participants(4, checkpoint=(("model", 0),)))
    eventually(lambda: len(watching()) > len(before))
    context.close(timeout=0.5)
    eventually(lambda: watching() == before)


def test_after_the_end_each_call_says_that_the_context_is_closed(tmp_path: Path) -> None:
    with local(tmp_path / "run") as context:
        coordinator = context.coordinator(0, 1)
    with pytest.raises(CoordinatorClosedError, match="save of step 4: the context"):
        coordinator.save(4, model=torch.nn.Linear(1, 1))
    with pytest.raises(CoordinatorClosedError, match="finish: the context"):
        coordinator.finish(4)


def test_a_report_says_how_long_the_loop_of_a_pace_ran_and_waited() -> None:
    assert progress_report(1, 2, None).loop_seconds is None
    report = progress_report(1, 2, None, pace_seconds=(10.00049, 2.5))
    assert (report.loop_seconds, report.waited_seconds) == (10.0, 2.5)
