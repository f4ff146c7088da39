"""Which images of monitors the operator starts; pure."""

from trainsync_operator.builders.target import MonitorSettings

ANY = "*"


def repository(image: str) -> str:
    """An image's name without tag and digest."""
    name = image.partition("@")[0]
    path, slash, last = name.rpartition("/")
    return f"{path}{slash}{last.partition(':')[0]}"


def why_refused(asked: str | None, chosen: MonitorSettings, running: str | None) -> str | None:
    """One sentence on why a run may not have the image that it asks for; None when it may.

    Args:
        asked: ``spec.monitor.image``.
        chosen: names the default image and the allowed repositories.
        running: the image that the run's monitor has already, which it keeps.
    """
    if asked is None or asked == running:
        return None
    name = repository(asked)
    allowed = (repository(chosen.image), *chosen.allowed)
    if any(e in (ANY, name) or (e.endswith("/") and name.startswith(e)) for e in allowed):
        return None
    return (
        f"spec.monitor.image: {asked} is not allowed here, where monitors come from"
        f" {', '.join(allowed)}: leave the field out, name an image from there, or have an"
        f" administrator add {name} to monitorImage.allowed of the operator's chart."
    )
