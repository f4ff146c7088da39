"""The installed verl version, without an import of verl."""

from importlib.metadata import PackageNotFoundError, version


def _series() -> str:
    try:
        return ".".join(version("verl").split(".")[:2])
    except PackageNotFoundError:
        return ""


VERL_0_8 = _series() == "0.8"
