"""In place of SGLang's package of CUDA kernels, for an engine on a CPU (SGLang 0.5.23, attention of torch).

Any kernel can be imported; one that is called raises. P/D and HiCache use pinned memory, CUDA events and cudaHostRegister on
a CPU too: here they are plain memory and calls that do nothing, as a CPU does one thing after the other. HiCache's copies between
pages and its host pool are torch's; SGLang does not import them on a CPU, so they are builtins.
"""
import builtins

import torch

__version__ = "0.4.10"
__path__ = []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel")

    return kernel


class _Idle:
    """A device where nothing is in progress: each method returns the same."""

    def __init__(self, result):
        self._result = result

    def __getattr__(self, name):
        return lambda *_, **__: self._result

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def _unpinned(make):
    def call(*args, pin_memory=None, **kwargs):
        return make(*args, **kwargs)

    return call


def _pages_of(slots, page):
    return slots[::page] // page


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Layers of the engine, K and then V, into pools of [pages, layers, page, ...]."""
    layers, slots = len(src_ptrs) // len(dst_ptrs), src_indices.to(torch.int64)
    pages = _pages_of(dst_indices, page_size)
    for number, layer in enumerate(src_ptrs):
        pool, at = divmod(number, layers)
        tokens = layer[slots]
        dst_ptrs[pool][pages, at] = tokens.view(len(pages), page_size, *tokens.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """One layer of the pools into the engine's tensors of that layer."""
    pages, slots = _pages_of(src_indices, page_size), dst_indices.to(torch.int64)
    for pool, layer in zip(src_ptrs, dst_ptrs):
        layer[slots] = pool[pages, layer_id].flatten(0, 1)


if not torch.cuda.is_available():
    torch.cuda.cudart = lambda: _Idle(0)
    torch.cuda.Event = torch.cuda.current_stream = lambda *_, **__: _Idle(True)
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    for _make in ("empty", "empty_like", "zeros", "zeros_like", "ones", "full", "tensor", "arange"):
        setattr(torch, _make, _unpinned(getattr(torch, _make)))
    for _copy in (transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf):
        setattr(builtins, _copy.__name__, _copy)
