"""At which training steps something is due; pure."""


def is_due(step: int, interval: int, last: int | None = None) -> bool:
    """Whether ``step`` (from 1) is a multiple of ``interval``, or is the ``last`` one."""
    if interval < 1:
        raise ValueError(f"interval must be at least 1, got {interval}")
    return step > 0 and (step % interval == 0 or step == last)
