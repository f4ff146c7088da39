"""The path and content of every generated file."""

from pathlib import Path
from typing import Any, Final

import yaml

from monitoring import catalogue, fleet, operator, rules, run

REPOSITORY: Final = Path(__file__).resolve().parent.parent
CHART: Final = REPOSITORY / "charts" / "trainsync-operator"
RULES_FILE: Final = CHART / "rules" / "trainsync.yaml"
_RULES_HEAD: Final = "# Made by `make dashboards` from monitoring/rules.py: do not edit.\n"


class _Dumper(yaml.SafeDumper):
    """Dumps long strings as blocks, so that queries are readable."""


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    style = ">" if len(text) > 80 else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def rules_text(pace: rules.Pace) -> str:
    """A rule file."""
    body = yaml.dump(rules.groups(pace), Dumper=_Dumper, sort_keys=False, width=100)
    return _RULES_HEAD + body


def files() -> dict[Path, str]:
    """Path and content of each."""
    dashboards = CHART / "dashboards"
    return {
        dashboards / "fleet.json": fleet.build(),
        dashboards / "run.json": run.build(),
        dashboards / "operator.json": operator.build(),
        RULES_FILE: rules_text(rules.Pace()),
        REPOSITORY / "docs" / "metrics.md": catalogue.page(),
    }
