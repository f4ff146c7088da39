"""Where this process computes: the accelerator it sees, or the CPU."""

import os

import torch


def prepare_device() -> torch.device:
    """This process's accelerator (by ``LOCAL_RANK`` where torchrun sets it), or the CPU.

    Under Ray a process sees only the accelerators that Ray gave it, so index 0 is its own.
    """
    # One thread adds numbers in one order whatever the number of cores, so that a resumed run
    # repeats its losses bit for bit; and the processes of a small machine do not fight for cores.
    torch.set_num_threads(1)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)
