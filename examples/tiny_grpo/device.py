"""The device of this process: its accelerator, or the CPU."""

import os

import torch


def prepare_device() -> torch.device:
    """This process's accelerator (by ``LOCAL_RANK`` where torchrun sets it), or the CPU.

    Under Ray a process sees only its own accelerators, so index 0 is right.
    """
    # One thread sums in the same order on any number of cores, so a resumed run repeats its losses
    # bit for bit, and processes do not compete for cores.
    torch.set_num_threads(1)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)
