"""The names of a merged model: those of its class in transformers, without wrappers' prefixes."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainsync.checkpoint.errors import MergeError

logger = logging.getLogger(__name__)

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_SHOWN = 5


@dataclass(frozen=True)
class Names:
    """The names that transformers expects to find.

    Attributes:
        all: every name of the class's state dict.
        tied: name that shares its weights with another one → that one, which is to be written.
        model: of the class, without memory for its weights.
    """

    all: frozenset[str]
    tied: dict[str, str]
    model: Any

    def exported(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """A weight as files have it: transformers holds some otherwise, such as experts in one.

        Raises:
            MergeError: it cannot be made from this weight alone.
        """
        try:
            from transformers import core_model_loading
        except ImportError:  # before version 5 it held them as files do
            return {name: tensor}
        try:
            made: dict[str, torch.Tensor] = core_model_loading.revert_weight_conversion(
                self.model, {name: tensor}
            )
        except Exception as error:
            raise MergeError(f"{name} cannot be turned into what files have: {error}") from error
        return made


def tensor_names(state: Mapping[str, Any]) -> list[str]:
    """Names of the weights in a model's state, in order.

    Raises:
        MergeError: it holds something else, or nothing.
    """
    names = []
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            names.append(name)
        elif not name.endswith("_extra_state"):  # of modules that keep more than weights
            raise MergeError(f"{name} is a {type(value).__name__}; expected weights")
    if not names:
        raise MergeError("the model's shards hold no tensors")
    return names


def clean(names: Iterable[str]) -> dict[str, str]:
    """Each name without what FSDP1, ``torch.compile``, checkpointing and DDP put into it → itself.

    Raises:
        MergeError: two become the same.
    """
    cleaned: dict[str, str] = {}
    for name in names:
        short = name
        for wrapper in _WRAPPERS:
            short = short.replace(wrapper, "")
        if short in cleaned:
            raise MergeError(f"{cleaned[short]} and {name} are both {short} without wrappers")
        cleaned[short] = name
    if all(name.startswith("module.") for name in cleaned):
        cleaned = {short.removeprefix("module."): name for short, name in cleaned.items()}
    return cleaned


def expected_names(folder: Path) -> Names | None:
    """The names of the model class that ``config.json`` in ``folder`` names.

    None when transformers is not installed or has no such class; code that came with a model is
    never run.

    Raises:
        MergeError: the configuration cannot be understood.
    """
    try:
        import transformers
    except ImportError:
        return None
    try:
        config: Any = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError) as error:
        logger.warning("transformers does not know this model: %s", error)
        return None
    except OSError as error:
        raise MergeError(f"config.json of the model cannot be read: {error}") from error
    architecture = next(iter(getattr(config, "architectures", None) or ()), None)
    kind = getattr(transformers, architecture or "", None)
    if kind is None:
        logger.warning("transformers has no %s: names and ties are not checked", architecture)
        return None
    try:
        with torch.device("meta"):
            model = kind(config)
    except (ImportError, TypeError, ValueError) as error:  # it wants a package that is not here
        logger.warning("%s cannot be made, so names are not checked: %s", architecture, error)
        return None
    by_tensor: dict[int, str] = {}
    tied = {
        name: by_tensor[id(value)]
        for name, value in model.named_parameters(remove_duplicate=False)
        if by_tensor.setdefault(id(value), name) != name
    }
    return Names(frozenset(model.state_dict()), tied, model)


def check_complete(found: Iterable[str], expected: Names) -> None:
    """See that a model of the class would be filled: transformers leaves out what is not there.

    Raises:
        MergeError: names are missing.
    """
    names = set(found)
    missing = sorted(
        name for name in expected.all - names if expected.tied.get(name, name) not in names
    )
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise MergeError(
            f"the checkpoint lacks {', '.join(missing[:_SHOWN])}{more}, which the class in its "
            f"config.json has; it has {', '.join(sorted(names)[:_SHOWN])} …"
        )
    unknown = sorted(names - expected.all)
    if unknown:
        logger.warning(
            "%d names are not of the class in config.json, such as %s; they are written too",
            len(unknown),
            unknown[0],
        )
