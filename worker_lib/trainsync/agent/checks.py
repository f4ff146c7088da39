"""Checks of an agent's options, each of which tells a fault in one sentence."""

import re
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from trainsync.api.names import DRIVER_PATTERN
from trainsync.engines.servers.adapter import Adapter, AdapterConfigError

ChoiceT = TypeVar("ChoiceT", bound=str)
_MOST_DIGITS: Final = 18


class AgentSettingsError(Exception):
    """An option or variable has a wrong value; the message names the option."""


def url(option: str, text: str) -> str:
    """An http URL without a path, without its last slash."""
    try:
        parts = urlsplit(text)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname
        wrong = wrong or parts.port == 0 or parts.path not in ("", "/")
        # Of a query or a fragment; and characters that `urlsplit` leaves out, but no client does.
        wrong = wrong or any(mark in "?#" or mark <= " " for mark in text)
        (parts.hostname or "").encode("idna")
    except ValueError:  # of a port that is no number, or a host with an empty label
        wrong = True
    if wrong:
        raise AgentSettingsError(f"{option} is {text!r}, expected such as http://127.0.0.1:8000")
    return text.rstrip("/")


def address(text: str) -> str:
    """An IP address."""
    try:
        return str(ip_address(text))
    except ValueError:
        raise AgentSettingsError(f"--host is {text!r}, expected an IP address") from None


def number(option: str, given: object, least: int, most: int | None = None) -> int:
    """A whole number of at least ``least``."""
    text = str(given)
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    if not is_number or not least <= int(text) <= (most or int(text)):
        upper = f" and at most {_MOST_DIGITS} digits" if most is None else f" and at most {most}"
        raise AgentSettingsError(
            f"{option} is {text!r}, expected a whole number of at least {least}{upper}"
        )
    return int(text)


def choice(option: str, given: str, known: Sequence[ChoiceT]) -> ChoiceT:
    """One of ``known``."""
    for value in known:
        if value == given:
            return value
    raise AgentSettingsError(f"{option} is {given!r}, expected one of {', '.join(map(str, known))}")


def driver(name: str | None, *, custom: bool) -> str | None:
    """The function that ``--driver`` names; None: the option is not given.

    Args:
        custom: whether the engine is ``custom``, which needs one.
    """
    if not name:
        if custom:
            raise AgentSettingsError("--engine custom needs --driver, as package.module:function")
        return None
    if not custom:
        raise AgentSettingsError("--driver is given, expected --engine custom")
    if re.fullmatch(DRIVER_PATTERN, name) is None:
        raise AgentSettingsError(f"--driver is {name!r}, expected such as package.module:function")
    return name


def adapter(name: str | None, config: str | None, beside: Sequence[str]) -> Adapter | None:
    """The adapter that ``--adapter`` names; None: neither option is given.

    Args:
        config: PEFT's file, or its content.
        beside: options that are given, and go with whole models alone.
    """
    if not name and not config:
        return None
    if not name or not config:
        raise AgentSettingsError(
            "--adapter and --adapter-config are given together, or neither of them"
        )
    if beside:
        raise AgentSettingsError(f"{beside[0]} is not supported beside --adapter")
    try:
        if config.lstrip().startswith("{"):
            return Adapter.parse(name, config, "the text")
        return Adapter.read(name, Path(config))
    except AdapterConfigError as error:
        raise AgentSettingsError(f"--adapter-config: {error}") from error
