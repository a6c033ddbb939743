"""Which device computes. Importing this needs neither torch nor triton."""

from __future__ import annotations

import importlib.util
from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda"]


class DeviceUnavailableError(ValueError):
    """The device that was asked for cannot be used here; the message says why."""


def resolve_device(name: DeviceName) -> Literal["cpu", "cuda"]:
    """`auto` is CUDA where it can be used. Raises DeviceUnavailableError when `cuda` is insisted on and cannot be."""
    if name == "cpu":
        return "cpu"
    missing = why_no_cuda()
    if missing is None:
        return "cuda"
    if name == "cuda":
        raise DeviceUnavailableError(f"device is 'cuda', but {missing}")
    return "cpu"


def why_no_cuda() -> str | None:
    """What keeps CUDA from being used here; None when nothing does."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton, which compiles the kernels, is not installed"
    return None
