"""What verl's paths mean."""

from pathlib import Path

import pytest
from trainsync.engines.checkpoints.arguments import (
    SaveTarget,
    component_prefix,
    held_directory,
    model_of,
    model_place,
    place_of,
    total_steps,
)

RUN = Path("/run")


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_a_models_place_is_known_in_the_run_and_where_the_trainer_writes_meanwhile(
    model: str,
) -> None:
    assert model_place(RUN / "global_step_3" / model, RUN, 3, model) == SaveTarget(
        model, held=False
    )
    aside = held_directory(RUN, "main-1234") / "global_step_3" / model
    assert model_place(aside, RUN, 3, model) == SaveTarget(model, held=True)


def test_a_models_place_in_a_store_is_known_and_where_the_trainer_writes_meanwhile() -> None:
    url = "s3://bucket/runs/a"
    assert model_place(f"{url}/global_step_3/actor", url, 3, "actor") == SaveTarget(
        "actor", held=False
    )
    aside = held_directory(Path("/tmp/x/s3:/bucket/runs/a"), "main") / "global_step_3" / "actor"
    assert model_place(aside, url, 3, "actor") == SaveTarget("actor", held=True)
    with pytest.raises(ValueError, match=f"expected {url}/global_step_N/<folder>"):
        model_place("/run/global_step_3/actor", url, 3, "actor")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/run/global_step_4/actor", "is of step 4, but global_step is 3"),
        ("/run/global_step_3/critic", "is in the folder critic; expected actor"),
        ("/elsewhere/global_step_3/actor", "is not a place of this run"),
        ("/run/.trainsync/trainer/main-1/actor", "is not a place of this run"),
        ("/run/.trainsync/trainer", "is not a place of this run"),
    ],
)
def test_any_other_place_is_refused(path: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        model_place(path, RUN, 3, "actor")


def test_the_trainers_last_word_is_a_place_of_its_own() -> None:
    path = held_directory(RUN, "main-1234") / "global_step_3" / "trainer"
    assert place_of(path, RUN, 3) == SaveTarget("trainer", held=True)


def test_components_of_a_critic_have_a_prefix() -> None:
    assert [component_prefix(model) for model in ("actor", "critic")] == ["", "critic_"]
    assert [model_of(prefix) for prefix in ("", "critic_")] == ["actor", "critic"]


@pytest.mark.parametrize("given", ["0", "-1", "ten", ""])
def test_a_last_step_that_is_no_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("TRAINSYNC_VERL_TOTAL_STEPS", given)
    with pytest.raises(ValueError, match="expected the number of the last step"):
        total_steps()
