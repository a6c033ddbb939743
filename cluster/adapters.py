"""LoRA adapters of the whole cluster: what every worker has is announced; what an operator wants, every worker gets.

What is wanted stands in a file of the state folder, so that all gateways agree and new workers are given it too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.api.channel import LoadAdapter, UnloadAdapter
from cluster.api.errors import InvalidRequestError, NotFoundError, UnavailableError
from cluster.api.worker_state import WorkerInfo
from cluster.control_client import ControlCalls

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
NEWS_S = 5.0  # what a worker has is known here after its next heartbeat and the router's next answer


class AnnouncedAdapters(Mapping[str, bytes]):
    """Name -> content digest of what all workers that take work have with the same content, now."""

    def __init__(self, workers: Callable[[], tuple[WorkerInfo, ...]]) -> None:
        self._workers = workers

    def _current(self) -> dict[str, bytes]:
        held = [dict(worker.adapters) for worker in self._workers()]
        if not held or not held[0]:
            return {}
        return {name: digest for name, digest in held[0].items() if all(one.get(name) == digest for one in held)}

    def __getitem__(self, name: str) -> bytes:
        return self._current()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())


@dataclass(frozen=True, slots=True)
class WantedAdapter:
    """`digest` in hex: another worker must find the same content, or it does not load it."""

    folder: str
    digest: str


class AdapterManager:
    """Changes of one gateway happen one after the other; the file is read anew for each."""

    def __init__(self, control: ControlCalls, file: Path, model: str, announced: Mapping[str, bytes]) -> None:
        self._control = control
        self._file = file
        self._model = model
        self._announced = announced
        self._lock = asyncio.Lock()
        self._refusals: set[tuple[str, LoadAdapter]] = set()  # (epoch, call): read again only when somebody loads anew

    async def load(self, name: str, folder: str, *, replaces: bool) -> bytes:
        """Returns the content's digest once every worker has it. Raises InvalidRequestError for what cannot be loaded,
        UnavailableError when a worker does not answer: it gets the adapter later, and the name is announced then."""
        async with self._lock:
            wanted = self._read()
            if name == self._model:
                raise InvalidRequestError(f"{name!r} is the model's own name", param="lora_name")
            if not replaces and (name in wanted or name in self._announced):
                raise InvalidRequestError(
                    f"an adapter is loaded under the name {name!r}; load_inplace replaces it", param="lora_name"
                )
            self._refusals.clear()
            digest: bytes | None = None
            for worker in self._control.members:
                answer = await self._control.call(worker, LoadAdapter(name, folder, digest))
                if not isinstance(answer, bytes):
                    raise InvalidRequestError(str(answer), param="lora_path")
                if digest is None:  # from now on a worker that fails is given it by `sync`
                    digest = answer
                    self._write({**wanted, name: WantedAdapter(folder, digest.hex())})
            if digest is None:
                raise UnavailableError("no worker is there to load an adapter", retry_after_s=1.0)
        await self._until(lambda: self._announced.get(name) == digest)
        return digest

    async def unload(self, name: str) -> None:
        """Raises NotFoundError when nothing goes by the name, UnavailableError when a worker does not answer."""
        async with self._lock:
            wanted = self._read()
            is_known = wanted.pop(name, None) is not None
            self._write(wanted)
            for worker in self._control.members:
                is_known = bool(await self._control.call(worker, UnloadAdapter(name))) or is_known
            if not is_known:
                raise NotFoundError(
                    f"no adapter is loaded under the name {name!r}", param="lora_name", code="model_not_found"
                )
        await self._until(lambda: name not in self._announced)

    async def run(self) -> None:
        while True:
            try:
                await self.sync()
            except Exception:
                logger.exception("giving adapters to workers failed; trying again")
            await asyncio.sleep(PERIOD_S)

    async def sync(self) -> None:
        """Gives every worker what it lacks."""
        async with self._lock:
            for name, wanted in self._read().items():
                digest = bytes.fromhex(wanted.digest)
                for worker in self._control.members:
                    if dict(worker.adapters).get(name) != digest:
                        await self._give(worker, LoadAdapter(name, wanted.folder, digest))

    async def _give(self, worker: WorkerInfo, call: LoadAdapter) -> None:
        if (worker.epoch, call) in self._refusals:
            return
        try:
            answer = await self._control.call(worker, call)
        except UnavailableError as error:
            logger.warning("%s has no adapter %r yet: %s", worker.worker_id, call.name, error.message)
            return
        if not isinstance(answer, bytes):
            self._refusals.add((worker.epoch, call))
            logger.warning("%s has no adapter %r: %s", worker.worker_id, call.name, answer)

    async def _until(self, is_known: Callable[[], bool]) -> None:
        """So that whoever asks right after the answer finds what it says; a silent router delays it no longer."""
        for _ in range(int(NEWS_S / 0.05)):
            if is_known():
                return
            await asyncio.sleep(0.05)

    def _read(self) -> dict[str, WantedAdapter]:
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return {name: WantedAdapter(**one) for name, one in stored.items()}

    def _write(self, wanted: Mapping[str, WantedAdapter]) -> None:
        """Atomically, for its owner alone."""
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, path = tempfile.mkstemp(dir=self._file.parent, prefix=".adapters-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({name: asdict(one) for name, one in wanted.items()}, file, indent=1)
        os.replace(path, self._file)
