"""``trainsync run rollback``: what it asks for, and each answer of the monitor."""

from dataclasses import replace

from tests.unit.cli.run.api_server import RUNS, Answer, ApiServer, Object, training_run
from tests.unit.cli.run.conftest import QUICK, Call


def answering(server: ApiServer, state: str, message: str) -> None:
    """The monitor answers whatever is asked for."""
    run = training_run()

    def get(_: object) -> Answer:
        if server.patched:
            asked = server.patched[-1]["spec"]["resumeFrom"]
            answer = {**asked, "state": state, "message": message}
            run["status"]["checkpoint"]["rollback"] = answer
        return 200, run

    server.answers[f"{RUNS}/run"] = get


def test_it_asks_for_the_step_and_tells_the_answer(call: Call, server: ApiServer) -> None:
    answering(server, "Accepted", "checkpoint 30 is committed; the next attempt goes on from it")
    result = call("rollback", "run", "--step", 30)
    assert result.exit_code == 0, result.output
    assert "accepted: checkpoint 30 is committed" in result.stderr
    (change,) = server.patched
    wanted: Object = change["spec"]["resumeFrom"]
    assert wanted["step"] == 30
    assert wanted["request"]


def test_a_refusal_is_told_with_its_reason(call: Call, server: ApiServer) -> None:
    answering(server, "Refused", "checkpoint 31 is not committed; steps 30, 35, 40 are")
    result = call("rollback", "run", "--step", 31)
    assert result.exit_code == 3
    assert "the run goes on as it is: checkpoint 31 is not committed" in result.stderr


def test_an_earlier_answer_is_not_taken_for_this_one(call: Call, server: ApiServer) -> None:
    run = training_run()
    earlier = {"step": 30, "request": "earlier", "state": "Done", "message": "done"}
    run["status"]["checkpoint"]["rollback"] = earlier
    server.set_runs(run)
    hasty = replace(QUICK, answer_seconds=0.5)
    result = call("rollback", "run", "--step", 30, pace=hasty)
    assert result.exit_code == 3
    assert "has not answered within 0.5 s" in result.stderr


def test_a_run_that_has_ended_is_left_alone(call: Call, server: ApiServer) -> None:
    server.set_runs(training_run(phase="Complete"))
    result = call("rollback", "run", "--step", 30)
    assert result.exit_code == 3
    assert "run run is Complete, and no attempt begins any more" in result.stderr
    assert not server.patched


def test_somebody_without_the_right_hears_so(call: Call, server: ApiServer) -> None:
    server.patch_answer = (403, {"kind": "Status", "message": "forbidden"})
    result = call("rollback", "run", "--step", 30)
    assert result.exit_code == 3
    assert "you may not change TrainingRun run" in result.stderr
