"""The kernels that SGLang imports at its start on a CPU. Only speculative decoding calls them."""

from collections.abc import Callable
from typing import Any, NoReturn


def _missing(name: str) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is a kernel of SGLang that is not built here")

    return call


assign_draft_cache_locs_contiguous_cpu = _missing("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _missing("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _missing("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _missing("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _missing("fill_bonus_tokens_cpu")
verify_tree_greedy_cpu = _missing("verify_tree_greedy_cpu")
