"""Save and upload the weights of FSDP modules.

``engine`` is verl's FSDPEngine (FSDP1 or FSDP2, with or without LoRA), a `TrainedModule`, or
anything whose ``module`` is the sharded module; see `trainsync.engines.protocol.adapt`.
"""

import logging
import weakref
from pathlib import Path
from typing import Any

import torch

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.dist.ranks import ranks_of
from trainsync.engines.adapt import adapt
from trainsync.engines.checkpoints.paths import subdirectory
from trainsync.engines.fsdp.saving import stage_state_dict
from trainsync.engines.lora.merging import chosen_state
from trainsync.engines.protocol import TrainingEngine, module_of
from trainsync.engines.publish.gathered_upload import GatheredUpload
from trainsync.engines.publish.state_dicts import (
    UploadKind,
    log_saved,
    log_uploaded,
    uploader_of,
)
from trainsync.weights.proof.record import PROOF_NAME, Proof, encode_proof
from trainsync.weights.transports.object_store.upload import Uploaded

_GATHERED: "weakref.WeakKeyDictionary[torch.nn.Module, dict[UploadKind, GatheredUpload]]" = (
    weakref.WeakKeyDictionary()
)


def fsdp_save_state_dict(
    engine: Any,
    local_path: str | Path,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
    *,
    proof: Proof | None = None,
) -> None:
    """Save this rank's shards of the model as component ``model`` of the step's state dict.

    Returns when the parameters may change; a background thread writes
    ``<local_path>/model_world_size_W_rank_R.pt``, as verl names and loads it. Rank 0 also writes
    what verl's merger needs: ``fsdp_config.json`` and, in ``huggingface/``, configurations and the
    tokenizer or processor of verl's engine or of a `TrainedModule`. For a model with LoRA, the
    engine's configuration selects the weights; see `LoRAWeights`.

    Every rank calls this function; with FSDP1 the call is a collective.

    Args:
        local_path: ``<run directory>/global_step_N/actor``, or ``actor``; in a bucket with its
            URL for the directory.
        proof: of these weights, by `trainsync.weights.proof.asking.Prover` on all ranks; rank 0
            writes it as ``PROOF.json``. None: servers cannot prove the version.

    Raises:
        ValueError: the proof is of another step.
        The errors of `CheckpointCoordinator.save_async`.
    """
    if proof is not None and proof.weight_version != global_step:
        raise ValueError(f"the proof is of step {proof.weight_version}, expected {global_step}")
    trained, module = _trained(engine)
    config: Any = getattr(trained, "model_config", None)
    with trained.resident():
        stage_state_dict(
            coordinator,
            module,
            chosen_state(module, trained.lora),
            global_step,
            subdirectory(local_path, lambda: coordinator.where, global_step),
            config.get_processor() if hasattr(config, "get_processor") else None,
            {} if proof is None else {PROOF_NAME: encode_proof(proof)},
        )
    log_saved(logger, coordinator, global_step)


def fsdp_upload_state_dict(
    engine: Any,
    synchronizer: Any,
    global_step: int,
    logger: logging.Logger,
    *,
    timeout: float = 600.0,
    delta: bool = False,
    gather: bool = False,
    dtype: torch.dtype | None = None,
    group: Any = None,
) -> Uploaded:
    """Upload this rank's shards of the model as its part of version ``global_step``.

    Every rank of the process group calls this function; no rank gathers. The version is published
    when all parts are uploaded.

    Args:
        timeout: seconds. With ``gather`` an upload that fails may take twice that, since all ranks
            gather to the end.
        delta: see `Uploader`.
        gather: rank 0 gathers the model and uploads all of it, for trainers whose nodes but one
            have no room in Ray's object store. Slower: the bytes of all ranks pass through one.
            Rank 0 holds a bucket and one tensor more, the other ranks one of 4 MiB or less, with
            FSDP1 a wrapped module. Explorers get the same weights, except that tied weights of
            FSDP1 come under their first name only.
        dtype: wider floating-point tensors are sent in this dtype: float32 masters as bfloat16, in
            half the bytes. None: every tensor keeps its dtype.
        group: the process group of the ranks that hold the model; None: the default one.

    Raises:
        The errors of `Uploader.upload`; with ``gather`` on rank 0 alone.
        ValueError: both ``delta`` and ``gather``; a ``dtype`` that is not of floating point; this
            rank is not of the ``group``.
        GatherFailedError: with ``gather``, a weight could not be gathered, or not in time. The
            ranks must end then; see `GatheredUpload.upload`.
        TrainerRankFailedError: with ``gather``, another rank failed or is gone.
    """
    if delta and gather:
        raise ValueError(
            "deltas are of each rank's own part; expected gather=False with delta=True"
        )
    trained, module = _trained(engine)
    kind = UploadKind(delta, dtype, ranks_of(group))
    with trained.resident():
        if gather:
            ways = _GATHERED.setdefault(module, {})
            if kind not in ways:
                ways[kind] = GatheredUpload(dtype, group)
            uploaded = ways[kind].upload(module, trained.lora, synchronizer, global_step, timeout)
        else:
            uploader = uploader_of(module, kind)
            state = chosen_state(module, trained.lora)
            uploaded = uploader.upload(state, synchronizer, global_step, timeout)
    log_uploaded(logger, uploaded)
    return uploaded


def _trained(engine: Any) -> tuple[TrainingEngine, torch.nn.Module]:
    """Raises `TypeError` if the engine has no FSDP module."""
    trained = adapt(engine)
    return trained, module_of(trained)
