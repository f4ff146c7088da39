"""Values of other libraries as plain Python ones, which ``torch.load(weights_only=True)`` reads."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """``value`` with every NumPy and OmegaConf value in it converted to a Python built-in type.

    An array becomes a list of numbers: ``numpy.random.set_state`` takes either. Containers are
    copied; tensors and values of unknown types are returned unchanged.
    """
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    kind = type(value)
    if kind.__module__.partition(".")[0] == "omegaconf":
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [plain(item) for item in value]
    if kind is dict or kind is OrderedDict:
        return kind((key, plain(item)) for key, item in value.items())
    if kind is list or kind is tuple:
        return kind(plain(item) for item in value)
    return value
