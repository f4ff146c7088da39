"""The answers of the API server, read without the kubernetes package."""

import json


def message_in(body: str | bytes | None, otherwise: str) -> str:
    """The API server's own sentence in the body of a refusal; ``otherwise`` where there is none."""
    try:
        return str(json.loads(body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return otherwise
