"""Getters for fields of Kubernetes objects as plain data."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


def parse_time(text: str) -> datetime:
    """An RFC 3339 time as Kubernetes writes it, in UTC."""
    return datetime.fromisoformat(text).astimezone(UTC)


def optional_time(text: str | None) -> datetime | None:
    """`parse_time` of a field that may be absent."""
    return parse_time(text) if text else None


def metadata(obj: Mapping[str, Any]) -> dict[str, Any]:
    """The object's metadata."""
    found: dict[str, Any] = obj.get("metadata") or {}
    return found


def name(obj: Mapping[str, Any]) -> str:
    """The object's name."""
    return str(metadata(obj).get("name", ""))


def labels(obj: Mapping[str, Any]) -> dict[str, str]:
    """The object's labels."""
    return metadata(obj).get("labels") or {}


def annotations(obj: Mapping[str, Any]) -> dict[str, str]:
    """The object's annotations."""
    return metadata(obj).get("annotations") or {}


def status(obj: Mapping[str, Any]) -> dict[str, Any]:
    """The object's status, empty when it has none yet."""
    return obj.get("status") or {}


def being_deleted(obj: Mapping[str, Any]) -> bool:
    """Whether the object's deletion has begun."""
    return "deletionTimestamp" in metadata(obj)


def deletion_time(obj: Mapping[str, Any]) -> datetime | None:
    """When the object may be gone: the end of its grace period; None while it is not deleted."""
    return optional_time(metadata(obj).get("deletionTimestamp"))


def created(obj: Mapping[str, Any]) -> datetime:
    """When the API server made the object; whole seconds."""
    return parse_time(metadata(obj)["creationTimestamp"])


def owner(obj: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """The owner reference to an object of ``kind``."""
    for reference in metadata(obj).get("ownerReferences") or []:
        if reference.get("kind") == kind:
            found: dict[str, Any] = reference
            return found
    return None


def controller(obj: Mapping[str, Any]) -> dict[str, Any] | None:
    """The owner reference of the object's controller."""
    for reference in metadata(obj).get("ownerReferences") or []:
        if reference.get("controller"):
            found: dict[str, Any] = reference
            return found
    return None


def condition(obj: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """The condition of type ``kind`` in the object's status."""
    for entry in status(obj).get("conditions") or []:
        if entry.get("type") == kind:
            found: dict[str, Any] = entry
            return found
    return None


def condition_is_true(obj: Mapping[str, Any], kind: str) -> bool:
    """Whether the condition exists and is True."""
    found = condition(obj, kind)
    return found is not None and found.get("status") == "True"
