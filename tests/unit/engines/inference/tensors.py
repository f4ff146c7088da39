"""Tensors of every kind that an engine is given, and their bytes."""

import torch

Named = list[tuple[str, torch.Tensor]]


def every_kind() -> Named:
    values = torch.arange(24, dtype=torch.float32)
    return [
        ("float32", values.reshape(4, 6)),
        ("bfloat16, not contiguous", values.to(torch.bfloat16).reshape(4, 6).t()),
        ("float8", values.to(torch.float8_e4m3fn)),
        ("nan", torch.tensor([float("nan"), -0.0])),
        ("scalar", torch.tensor(7)),
        ("empty", torch.empty(0, 3)),
    ]


def raw(named: Named) -> list[tuple[str, torch.dtype, tuple[int, ...], bytes]]:
    return [
        (n, t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for n, t in named
    ]
