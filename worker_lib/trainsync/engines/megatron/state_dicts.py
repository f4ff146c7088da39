"""Save and upload the weights of Megatron engines.

``engine`` is verl's MegatronEngine or a `TrainedMegatron`; see `trainsync.engines.protocol.adapt`.
"""

import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.megatron_shards import pack
from trainsync.dist.ranks import ranks_of
from trainsync.engines.adapt import adapt
from trainsync.engines.checkpoints.paths import subdirectory
from trainsync.engines.megatron.files import megatron_files
from trainsync.engines.megatron.layout import ParallelLayout
from trainsync.engines.megatron.state import own_boxes
from trainsync.engines.protocol import TrainingEngine, is_megatron
from trainsync.engines.publish.gathering import GatherAhead
from trainsync.engines.publish.state_dicts import (
    UploadKind,
    log_saved,
    log_uploaded,
    uploader_of,
)
from trainsync.engines.verl.adapters import VerlMegatronEngine, chunks
from trainsync.weights.transports.object_store.upload import Uploaded

MODEL: Final = "model"

# The small files, made once for each model.
_FILES: "weakref.WeakKeyDictionary[torch.nn.Module, dict[str, bytes]]" = weakref.WeakKeyDictionary()


def megatron_save_state_dict(
    engine: Any,
    local_path: str | Path,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
    *,
    synchronous: bool = False,
) -> None:
    """Save this rank's part of the model as component ``model`` of the step's state dict.

    Returns when the parameters may change. A background thread writes
    ``<local_path>/model_world_size_W_rank_R.pt``, whose parts say where in the whole model they
    belong (see `trainsync.checkpoint.megatron_shards`), and a receipt with this rank's coordinates
    in Megatron's parallel dimensions. No rank waits for another.

    Two kinds of engine write with their own code instead, into the save's staging directory, while
    training waits: models with a LoRA adapter of Megatron-Bridge, and Megatron-FSDP. The engine's
    checkpoint manager is restricted to the model during the save; its settings are always restored.

    Every rank calls it.

    Args:
        local_path: ``<run directory>/global_step_N/actor``, or ``actor``; in a bucket with its
            URL for the directory.
        synchronous: let any engine write with its own code.

    Raises:
        TypeError: the engine lacks a required attribute.
        UnsupportedPlaceError: the engine would write with its own code, and the run's checkpoints
            are in a bucket.
        Exception: as `CheckpointCoordinator.save_async`; as `CheckpointCoordinator.save_sync` for
            an engine that writes with its own code.
    """
    trained = require_megatron(engine)
    subdir = subdirectory(local_path, lambda: coordinator.where, global_step)
    layout = ParallelLayout()
    if synchronous or getattr(trained, "writes_for_itself", False):
        _ = coordinator.directory  # refused in a bucket, where no reader takes what engines write
        save_by_engine(
            trained,
            MODEL,
            (MODEL,),
            subdir,
            global_step,
            coordinator,
            layout,
            is_state_dict=True,
        )
        how = "written by the engine"
    else:
        save_weights(trained, subdir, global_step, coordinator, layout, is_state_dict=True)
        how = "staged"
    log_saved(logger, coordinator, global_step, how, layout.coordinates)


def megatron_upload_state_dict(
    engine: Any,
    synchronizer: Any,
    global_step: int,
    logger: logging.Logger,
    *,
    timeout: float = 600.0,
    delta: bool = False,
    dtype: torch.dtype | None = None,
    group: Any = None,
) -> Uploaded:
    """Upload the weights, under the names that Hugging Face has for them, as version
    ``global_step``.

    The ranks gather one weight at a time, and each uploads its share of them while the next ones
    are gathered; none ever holds the whole model. The version is published when all shares are
    there. Every rank of the process group calls it.

    Args:
        timeout: seconds for the whole upload, including weights that are not gathered because a
            rank is gone.
        delta: not supported yet; must be False.
        dtype, group: see `fsdp_upload_state_dict`.

    Raises:
        ValueError: ``delta`` is set; or ``dtype`` or ``group`` is wrong, as in
            `fsdp_upload_state_dict`.
        GatherFailedError: a weight could not be gathered in time.
        The errors of `Uploader.upload`.
    """
    refuse_delta(delta)
    trained = require_megatron(engine)
    model = chunks(trained.module)[0]
    uploader = uploader_of(model, UploadKind(delta, dtype, ranks_of(group)))
    gathered = GatherAhead(trained.get_per_tensor_param, timeout)
    try:
        uploaded = uploader.upload_stream(gathered, synchronizer, global_step, timeout)
    except BaseException:
        gathered.abandon()  # this rank still gathers: the others wait for it
        raise
    log_uploaded(logger, uploaded)
    return uploaded


def refuse_delta(delta: bool) -> None:
    """Raises `ValueError` if ``delta`` is set."""
    if delta:
        raise ValueError(
            "the weights of a Megatron engine are uploaded whole; expected sync.delta false with "
            "the method memory (nccl sends deltas of them)"
        )


def require_megatron(engine: Any) -> TrainingEngine:
    """``engine`` as a `TrainingEngine`. Raises `TypeError`: it has no Megatron models."""
    trained = adapt(engine)
    if not is_megatron(trained.module):
        raise TypeError(
            f"{type(engine).__name__}.module is not a list of Megatron models; expected a "
            "MegatronEngine of verl 0.8 or 0.9 after initialize(), or a TrainedMegatron: use "
            "fsdp_save_state_dict and its like for FSDP"
        )
    return trained


def save_weights(
    trained: TrainingEngine,
    subdir: str,
    step: int,
    coordinator: CheckpointCoordinator,
    layout: ParallelLayout,
    *,
    is_state_dict: bool,
    with_checkpoint: bool = False,
    attachments: Mapping[str, bytes] | None = None,
) -> bool:
    """Stage this rank's weights as component `MODEL`; whether the coordinator accepted them.

    Args:
        with_checkpoint: see `CheckpointCoordinator.save_async`.
        attachments: more small files beside rank 0's.

    Raises:
        The errors of `CheckpointCoordinator.save_async`.
    """
    with trained.resident():
        models = chunks(trained.module)
        small: dict[str, bytes] = {}
        if coordinator.rank == 0:
            small = _files(trained, models[0], layout) | dict(attachments or {})
        return coordinator.save_async(
            MODEL,
            pack(own_boxes(models), described(layout)),
            step,
            is_state_dict=is_state_dict,
            subdir=subdir,
            attachments=small,
            overlapped=False,  # a Megatron optimizer's step cannot be delayed
            coordinates=layout.coordinates,
            with_checkpoint=with_checkpoint,
        )


def save_state(
    component: str,
    state: Mapping[str, Any],
    subdir: str,
    step: int,
    coordinator: CheckpointCoordinator,
    layout: ParallelLayout,
) -> bool:
    """Stage this rank's part of another component; whether the coordinator accepted the part.

    Raises:
        The errors of `CheckpointCoordinator.save_async`.
    """
    return coordinator.save_async(
        component, state, step, subdir=subdir, overlapped=False, coordinates=layout.coordinates
    )


def described(layout: ParallelLayout) -> dict[str, int]:
    """Sizes of the parallel dimensions and this rank's coordinates, in the format of `pack`."""
    return {**layout.sizes, **_ranks(layout)}


def save_by_engine(
    trained: TrainingEngine,
    component: str,
    contents: Sequence[str],
    subdir: str,
    step: int,
    coordinator: CheckpointCoordinator,
    layout: ParallelLayout,
    *,
    is_state_dict: bool,
) -> None:
    """Let the engine write ``contents`` (verl's names) as ``component``, while training waits.

    Raises:
        TypeError: the engine has no save of its own.
        The errors of `CheckpointCoordinator.save_sync`.
    """
    if not isinstance(trained, VerlMegatronEngine):
        raise TypeError(
            f"{type(trained).__name__} writes nothing by itself; expected a MegatronEngine of verl"
        )
    engine = trained

    def write(directory: Path) -> None:
        with engine.saving_only(*contents):
            engine.save_checkpoint(directory, step)
        # Some ranks write only this file: verl's bridge lets rank 0 write all weights. After the
        # engine's collectives, in which the other ranks would wait for a rank that fails here.
        about = json.dumps(described(layout))
        (directory / layout_file(coordinator.rank)).write_text(about + "\n")

    coordinator.save_sync(
        component,
        write,
        step,
        is_state_dict=is_state_dict,
        subdir=subdir,
        coordinates=layout.coordinates,
    )


def layout_file(rank: int) -> str:
    """Path of a rank's layout file, for saves that the engine writes with its own code."""
    return f"megatron_config_rank_{rank}.json"


def _files(
    trained: TrainingEngine, model: torch.nn.Module, layout: ParallelLayout
) -> dict[str, bytes]:
    files = _FILES.get(model)
    if files is None:
        config = getattr(trained, "model_config", None)
        files = _FILES[model] = megatron_files(config, layout)
    return files


def _ranks(layout: ParallelLayout) -> dict[str, int]:
    return {f"{name}_rank": rank for name, rank in layout.coordinates.items()}
