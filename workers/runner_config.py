"""Settings of the model runner, validated on construction. Knows nothing of scheduling, requests or caching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from workers.device import DeviceName

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
KernelName = Literal["auto", "native", "torch"]
LayoutName = Literal["packed", "padded"]

MAX_BLOCK_SIZE = 256


@dataclass(frozen=True)
class RunnerConfig:
    """What decides a runner's tensors.

    `num_blocks` sizes the KV pool; where it is None, `gpu_memory_fraction` does on a GPU, else `kv_cache_bytes`.
    """

    model: str | None = None  # folder, .gguf file or hub id; None = the small model that comes with the installation
    device: DeviceName = "auto"  # auto = CUDA where it can be used
    dtype: DtypeName = "auto"  # auto = bfloat16 where the processor multiplies it, else float32
    block_size: int = 16  # tokens per KV block
    num_blocks: int | None = None
    kv_cache_bytes: int | None = 1 << 30
    gpu_memory_fraction: float | None = 0.9  # share of what weights and the largest step leave free on a GPU
    window_fraction: float = 1.0  # of the blocks may have a place in sliding-window layers at a time; 1: all of them
    max_model_len: int | None = None  # None = the model's own context length
    max_num_batched_tokens: int = 2048  # most tokens that one step may carry: sizes the buffers and the self-test
    max_num_seqs: int = 256  # most rows that one step may carry
    adapters: tuple[tuple[str, str], ...] = ()  # (name, folder) of LoRA adapters
    may_load_adapters: bool = False  # at run time: then torch computes, since the C kernels know no adapters
    threads: int | None = None  # None = what torch would use
    kernel: KernelName = "auto"
    batch_invariant: bool = True  # False lets a GPU use its fastest products: rows may then feel one another
    layout: LayoutName = "packed"
    row_padding: bool = True  # False switches off what makes small batches bit-exact: only tests want that
    self_test: bool = True

    def __post_init__(self) -> None:
        _check_choice("device", self.device, get_args(DeviceName))
        _check_choice("dtype", self.dtype, get_args(DtypeName))
        _check_choice("kernel", self.kernel, get_args(KernelName))
        _check_choice("layout", self.layout, get_args(LayoutName))
        _check_range("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size is {self.block_size}, must be a power of two from 1 to {MAX_BLOCK_SIZE}")
        if self.num_blocks is None and self.kv_cache_bytes is None:
            raise ValueError("num_blocks and kv_cache_bytes are both None, one must size the KV pool")
        _check_range("num_blocks", self.num_blocks, 1, 1 << 30)
        _check_range("kv_cache_bytes", self.kv_cache_bytes, 1, 1 << 50)
        if self.gpu_memory_fraction is not None and not 0.0 < self.gpu_memory_fraction < 1.0:
            raise ValueError(f"gpu_memory_fraction is {self.gpu_memory_fraction}, must lie between 0 and 1")
        if not 0.0 < self.window_fraction <= 1.0:
            raise ValueError(f"window_fraction is {self.window_fraction}, must be above 0 and at most 1")
        _check_range("max_model_len", self.max_model_len, 1, 1 << 24)
        _check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        _check_range("max_num_seqs", self.max_num_seqs, 1, 1 << 16)
        _check_range("threads", self.threads, 1, 1024)
        names = [name for name, _ in self.adapters]
        for name in names:
            if not name or names.count(name) > 1:
                raise ValueError(f"adapters has {name!r} {names.count(name)} times, names are unique and not empty")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(allowed)}")


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name} is {value}, must be from {low} to {high}")
