import json
from pathlib import Path

import pytest

from images.build import LIBRARY, RECIPES, config_of
from images.layers import CODE
from images.pod_env import EXTRAS
from images.uv import REPOSITORY

CONTAINERFILES = {"operator": "operator", "monitor": "monitor", "ray-devcluster": "ray"}


@pytest.mark.parametrize("name", RECIPES)
def test_images_never_run_as_root(name: str) -> None:
    assert config_of(RECIPES[name]).user == "65532:65532"


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_copies_exists(name: str) -> None:
    assert [str(path) for path in RECIPES[name].code.values() if not path.exists()] == []


def test_the_operator_carries_only_the_api_and_the_kube_packages_of_the_library() -> None:
    parts = {path for path in RECIPES["operator"].code.values() if path.is_relative_to(LIBRARY)}
    assert parts == {LIBRARY / "__init__.py", LIBRARY / "api", LIBRARY / "kube"}


@pytest.mark.parametrize("name", RECIPES)
def test_the_containerfile_says_the_same(name: str) -> None:
    recipe = RECIPES[name]
    text = (REPOSITORY / "images" / f"{CONTAINERFILES[name]}.Containerfile").read_text()
    lines = text.splitlines()
    assert f"USER {config_of(recipe).user}" in lines
    extras = (recipe.extra,) if recipe.extra else EXTRAS
    wanted_extras = " ".join(f"--extra {extra}" for extra in extras)
    assert f"--no-default-groups {wanted_extras} >" in text
    for inside, source in recipe.code.items():
        assert f"COPY {source.relative_to(REPOSITORY)} {CODE}/{inside}" in lines
    entrypoints = [line for line in lines if line.startswith("ENTRYPOINT")]
    wanted = [f"ENTRYPOINT {json.dumps(list(recipe.entrypoint))}"] if recipe.entrypoint else []
    assert entrypoints == wanted


def test_containerfiles_use_the_uv_of_the_makefile() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    version = makefile.split("UV_VERSION := ")[1].split()[0]
    for path in Path(REPOSITORY / "images").glob("*.Containerfile"):
        assert f"uv=={version}" in path.read_text(), path.name
