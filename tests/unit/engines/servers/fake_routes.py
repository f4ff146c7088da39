"""A fake SGLang's routes for tensors and for a process group, as SGLang 0.5.23 answers them."""

import base64
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64"}
_LIMIT = timedelta(seconds=60)

Loaded = dict[str, tuple[str, list[int], bytes]]
Answer = tuple[int, dict[str, Any]]


class FakeRoutes:
    """One server process.

    Attributes:
        is_open: whether a session is.
        groups: by name, an end for each rank.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.is_open = False
        self.groups: dict[str, list[Any]] = {}

    def begin(self) -> Answer:
        if self.is_open:
            return _no("a weight-update session is already open; call end_weight_update() first")
        self.is_open = True
        return _YES

    def end(self) -> Answer:
        if not self.is_open:
            return _no("no weight-update session is open; call begin_weight_update() first")
        self.is_open = False
        return _YES

    def from_tensor(self, body: dict[str, Any]) -> tuple[Answer, Loaded]:
        if not self.is_open:
            return _no("update_weights_from_tensor must run between begin and end"), {}
        assert body.keys() == {"serialized_named_tensors", "flush_cache"}
        ranks = [
            pickle.loads(base64.b64decode(handle, validate=True))
            for handle in body["serialized_named_tensors"]
        ]
        assert len(ranks) == self.ranks
        return _YES, _same([dict(_shown(tensors)) for tensors in ranks])

    def init(self, body: dict[str, Any]) -> Answer:
        name = body["group_name"]
        assert name not in self.groups
        assert (body["rank_offset"], body["backend"]) == (1, "gloo")
        size = body["world_size"]
        assert size == 1 + self.ranks

        def join(rank: int) -> Any:
            place = body["master_address"], body["master_port"]
            store = TCPStore(*place, None, False, _LIMIT, wait_for_workers=False)
            prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            return dist.ProcessGroupGloo(prefixed, rank, size, _LIMIT)

        with ThreadPoolExecutor(self.ranks) as pool:
            self.groups[name] = list(pool.map(join, range(1, size)))
        return _YES

    def destroy(self, body: dict[str, Any]) -> Answer:
        if self.groups.pop(body["group_name"], None) is None:
            return _no("The group to be destroyed does not exist.")
        return _YES

    def from_distributed(self, body: dict[str, Any]) -> tuple[Answer, Loaded]:
        if not self.is_open:
            return _no("update_weights_from_distributed must run between begin and end"), {}
        assert body["load_format"] == "flattened_bucket"
        groups = self.groups.get(body["group_name"])
        if groups is None:
            return _no(f"Failed to receive weights: Group {body['group_name']} not in []"), {}
        places, offset = [], 0
        for name, kind, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            dtype = getattr(torch, kind)
            assert offset % dtype.itemsize == 0, "as FlattenedTensorBucket.empty asks for"
            size = torch.Size(shape).numel() * dtype.itemsize
            places.append((name, dtype, shape, offset, size))
            offset += size
        flats = [torch.empty(offset, dtype=torch.uint8) for _ in groups]
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        works = [
            group.broadcast([flat], options) for group, flat in zip(groups, flats, strict=True)
        ]
        try:
            for work in works:
                work.wait(_LIMIT)
        except RuntimeError as error:
            return _no(f"Failed to receive weights: {error}"), {}
        received = [
            dict(
                _shown(
                    [
                        (name, flat[begin : begin + size].view(dtype).reshape(shape))
                        for name, dtype, shape, begin, size in places
                    ]
                )
            )
            for flat in flats
        ]
        return _YES, _same(received)


def _same(ranks: list[Loaded]) -> Loaded:
    assert all(loaded == ranks[0] for loaded in ranks)
    return ranks[0]


_YES: Answer = (200, {"success": True, "message": "Success"})


def _no(message: str) -> Answer:
    return 400, {"success": False, "message": message}


def _shown(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    for name, tensor in tensors:
        data = tensor.clone().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, (_NAMES[str(tensor.dtype).removeprefix("torch.")], list(tensor.shape), data)
