"""Reads a model's tokenizer once through transformers and keeps it as plain files, so that later starts are fast."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

CACHE_FORMAT = 1

# Pre-tokenizers that split every digit off before the GPT-2 pattern; transformers' GGUF reader knows only the pattern.
_DIGIT_SPLITTING = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`backend_json` is what `tokenizers` reads; the rest is what a chat template may ask for."""

    backend_json: str
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token …: name → text
    eos_token_id: int | None


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "watchword"


def read_tokenizer_files(path: Path, gguf_file: str | None, cache_dir: Path) -> TokenizerFiles:
    """From the cache when the model's files have not changed since, else through transformers.

    Raises FileNotFoundError when `path` is absent and ValueError when it holds no usable fast tokenizer.
    """
    target = cache_dir / "tokenizers" / f"{_fingerprint(path, gguf_file)}.json"
    if target.is_file():
        return TokenizerFiles(**json.loads(target.read_text(encoding="utf-8")))
    files = _read_through_transformers(path, gguf_file)
    _write_atomically(target, json.dumps(asdict(files)))
    return files


def _fingerprint(path: Path, gguf_file: str | None) -> str:
    """Digest of name, size and modification time of every file that can decide the tokenizer."""
    if gguf_file is not None:
        candidates = [path / gguf_file]
    else:
        candidates = sorted(file for file in path.iterdir() if file.suffix in {".json", ".jinja", ".model", ".txt"})
    if not candidates or not all(file.exists() for file in candidates):
        raise FileNotFoundError(f"no tokenizer files in {path}" + (f" ({gguf_file})" if gguf_file else ""))
    digest = blake2b(f"{CACHE_FORMAT}".encode(), digest_size=16)
    for file in candidates:
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read_through_transformers(path: Path, gguf_file: str | None) -> TokenizerFiles:
    from transformers import AutoTokenizer  # slow to import, and needed only when the cache is cold

    arguments: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file is not None else {}
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, **arguments)
    if not tokenizer.is_fast:
        raise ValueError(f"the model in {path} has no tokenizer that the `tokenizers` library can run")
    backend = tokenizer.backend_tokenizer
    if gguf_file is not None and _gguf_pre_tokenizer(path / gguf_file) in _DIGIT_SPLITTING:
        _split_digits(backend)
    named = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several named templates: the plain one is for chats without tools
        template = template.get("default")
    return TokenizerFiles(backend.to_str(), template, named, tokenizer.eos_token_id)


def _gguf_pre_tokenizer(file: Path) -> str | None:
    from gguf import GGUFReader

    entry = GGUFReader(str(file)).get_field("tokenizer.ggml.pre")
    return None if entry is None else str(entry.contents())


def _split_digits(backend: Any) -> None:
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _write_atomically(target: Path, text: str) -> None:
    """A failure to write only costs time at the next start, so a read-only home directory is no error."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, target)
    except OSError:
        return
