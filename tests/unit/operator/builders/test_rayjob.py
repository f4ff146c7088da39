"""An attempt's RayJob."""

import pytest
import yaml
from trainsync.api.env import ATTEMPT, POD_REPLACEMENT_SECONDS, WARM_SPARE
from trainsync_operator.reconcile.run import SpecError

from tests.unit.operator.builders.built import built_job, with_cluster
from tests.unit.operator.support import UID, spec


def test_the_job_carries_its_attempt_over_that_of_the_pods_and_keeps_the_users_environment() -> (
    None
):
    given = f"working_dir: /app\nenv_vars: {{A: '1', {ATTEMPT}: '99'}}"
    runtime = yaml.safe_load(
        built_job(with_cluster(runtimeEnvYAML=given))["spec"]["runtimeEnvYAML"]
    )
    assert runtime == {"working_dir": "/app", "env_vars": {"A": "1", ATTEMPT: "7"}}
    assert yaml.safe_load(built_job()["spec"]["runtimeEnvYAML"]) == {"env_vars": {ATTEMPT: "7"}}


def test_the_job_is_told_what_a_restart_in_place_may_have() -> None:
    def told(name: str, **policy: object) -> str | None:
        job = built_job(spec(failurePolicy=policy))
        variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
        return variables.get(name)

    assert told(WARM_SPARE, warmSpare=True) == "true"
    assert told(WARM_SPARE, warmSpare=False) is told(WARM_SPARE) is None
    assert told(POD_REPLACEMENT_SECONDS, podReplacementSeconds=90) == "90"
    assert told(POD_REPLACEMENT_SECONDS) is None


@pytest.mark.parametrize("given", ["- a", "env_vars: 3", "a: [", "a: b: c", "a: 2026-13-45"])
def test_a_runtime_environment_that_cannot_be_read_is_refused_with_the_field(given: str) -> None:
    with pytest.raises(SpecError, match=r"spec.clusters\[main\].runtimeEnvYAML"):
        built_job(with_cluster(runtimeEnvYAML=given))


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("env_vars:\n  KEY: sk-secret: x", "line 2, column 17"),
        ("env_vars:\n  KEY: *sk-secret", "line 2, column 8"),
        ("env_vars:\n  KEY: !sk-secret x", "line 2, column 8"),
        ("a: [sk-secret", "line 1, column 14"),
    ],
)
def test_a_runtime_environment_that_is_no_yaml_is_not_quoted(given: str, place: str) -> None:
    with pytest.raises(SpecError) as refused:
        built_job(with_cluster(runtimeEnvYAML=given))
    assert "secret" not in str(refused.value)
    assert place in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


def test_the_controller_of_a_job_is_its_ray_cluster_and_the_run_owns_it_too() -> None:
    run, ray = built_job()["metadata"]["ownerReferences"]
    assert (run["kind"], run["uid"], run.get("controller")) == ("TrainingRun", UID, None)
    assert ray["controller"]
    assert (ray["kind"], ray["name"], ray["uid"]) == ("RayCluster", "tiny-main-5", "uid-ray")


def test_jobs_are_never_retried_by_kuberay() -> None:
    job = built_job()["spec"]
    assert job["backoffLimit"] == 0
    assert job["submissionMode"] == "HTTPMode"
    assert job["jobId"] == "tiny-main-7"
