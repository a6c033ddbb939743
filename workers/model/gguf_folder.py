"""Turns a GGUF file into a folder that transformers reads at once: config, tokenizer, and weights per dtype.

Parsing a GGUF file and undoing its quantisation takes seconds; the folder is made once and then kept.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workers.model.spec import UnsupportedModelError

_HEADER_BYTES = 1 << 25  # tensor names follow the vocabulary; both end well before this


def prepare_gguf_folder(file: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    """Writes config and tokenizer of `file` to `folder` unless they are there; readers see all or nothing."""
    if (folder / "config.json").is_file():
        return
    refuse_rope_factors(file)
    progress("converting the model's tokenizer and config", 0.1)
    from transformers import AutoConfig, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
    try:
        location, name = str(file.parent), file.name
        AutoConfig.from_pretrained(location, gguf_file=name).save_pretrained(work)
        progress("converting the model's tokenizer and config", 0.5)
        tokenizer = AutoTokenizer.from_pretrained(location, gguf_file=name)
        _repair_pre_tokenizer(file, tokenizer)
        tokenizer.save_pretrained(work)
        _publish(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress("converting the model's tokenizer and config", 1.0)


def gguf_tensors(file: Path, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of `file`, dequantised by transformers, under their transformers names."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype)
    return dict(loaded["tensors"])


def refuse_rope_factors(file: Path) -> None:
    """Such files scale the rotary embedding by a tensor that transformers ignores: the output would be wrong."""
    with file.open("rb") as stream:
        header = stream.read(_HEADER_BYTES)
    if not header.startswith(b"GGUF"):
        raise UnsupportedModelError(f"{file.name} is not a GGUF file")
    if b"rope_freqs.weight" in header:
        raise UnsupportedModelError(f"{file.name}: rope scaling by a tensor (rope_freqs.weight) is not supported")


def _repair_pre_tokenizer(file: Path, tokenizer: Any) -> None:
    """transformers drops the GGUF field that says how text is split: the SmolLM family splits off every digit."""
    with file.open("rb") as stream:
        header = stream.read(_HEADER_BYTES)
    key = b"tokenizer.ggml.pre"
    at = header.find(key)
    if at < 0:
        return
    value = header[at + len(key) : at + len(key) + 64]
    length = int.from_bytes(value[4:12], "little")  # u32 type, u64 length, text
    if value[12 : 12 + length] == b"smollm":
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _publish(work: Path, folder: Path) -> None:
    """Renames into place; another process that was faster wins, since both wrote the same."""
    try:
        os.rename(work, folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise
