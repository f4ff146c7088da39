"""Digests of a server's tensors show what is torn, as far as their layout is known."""

import hashlib

import torch
from trainsync.weights.proof.server_digests import ServerDigests, expected_digests, look

_PREFIX = "dp0:pp0:pcp0:tp0:"


def _version(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    names = ("norm.weight", "a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight", "o.weight")
    return {name: torch.randn(4, 4, generator=made).bfloat16() for name in names}


def _sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _server(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    fused = torch.cat([weights[f"a.{part}_proj.weight"] for part in "qkv"])
    return {
        f"{_PREFIX}norm.weight": _sha(weights["norm.weight"]),
        f"{_PREFIX}a.qkv_proj.weight": _sha(fused),
        f"{_PREFIX}o.weight": _sha(weights["o.weight"].t().contiguous()),  # a layout of its own
        f"{_PREFIX}cache.scale": "0",
    }


_NOTHING = ServerDigests()


def _look(
    weights: dict[str, torch.Tensor], digests: dict[str, str], before: ServerDigests = _NOTHING
) -> tuple[ServerDigests, str | None]:
    return look(digests, expected_digests(weights, digests), before)


def test_tensors_that_lie_as_in_the_checkpoint_or_fused_are_known() -> None:
    seen, problem = _look(_version(1), _server(_version(1)))
    assert problem is None
    assert seen.known == {f"{_PREFIX}norm.weight", f"{_PREFIX}a.qkv_proj.weight"}


def test_a_known_tensor_with_other_bytes_is_named() -> None:
    seen, _ = _look(_version(1), _server(_version(1)))
    torn = _server(_version(2)) | {f"{_PREFIX}a.qkv_proj.weight": "f" * 64}
    _, problem = _look(_version(2), torn, seen)
    assert problem is not None
    assert "1 tensors have other bytes" in problem
    assert "a.qkv_proj.weight" in problem
    _, problem = _look(_version(2), _server(_version(1)), seen)
    assert problem is not None
    assert "all of them are those of the version before" in problem
    _, problem = _look(_version(2), _server(_version(2)), seen)
    assert problem is None


def test_unknown_layouts_that_changed_before_and_do_not_now_are_stale() -> None:
    def digests(version: str) -> dict[str, str]:
        return {"packed": version, "norm": "0"}

    first, _ = look(digests("1"), {}, ServerDigests())
    second, problem = look(digests("2"), {}, first)
    assert problem is None
    assert second.changed == {"packed"}
    _, problem = look(digests("2"), {}, second)
    assert problem == "no tensor of the server changed with the update"
