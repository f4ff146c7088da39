"""How long pods stay bound to a node that is lost."""

from typing import Any, Final

SECONDS: Final = 30
_EFFECTS: Final = (None, "", "NoExecute")


def tolerations(given: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """``given``, and ours for the taints of a lost node that it does not speak of.

    Without one the API server adds its own, of 300 s, to each pod.
    """
    own = list(given or [])
    for state in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{state}"
        # A toleration without a key is of all taints.
        if any(one.get("key") in (None, "", key) and one.get("effect") in _EFFECTS for one in own):
            continue
        own.append(
            {
                "key": key,
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": SECONDS,
            }
        )
    return own
