"""Loading and unloading LoRA adapters at run time: files are read beside the engine, weights change between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from cluster.api.channel import LoadAdapter, UnloadAdapter
from workers.async_engine import AsyncLLMEngine
from workers.engine import LLMEngine
from workers.model.lora import AdapterError, LoraAdapter

T = TypeVar("T")


class AdapterHolder(Protocol):
    """The runner, as far as adapters go. All but `read_adapter` is for the step thread."""

    def read_adapter(self, name: str, folder: Path) -> LoraAdapter: ...
    def install_adapter(self, adapter: LoraAdapter) -> None: ...
    def remove_adapter(self, name: str) -> bool: ...


class AdapterLoader:
    """`root` is the folder below which adapters may lie; None: none may be loaded."""

    def __init__(
        self, engine: AsyncLLMEngine, holder: AdapterHolder, root: Path | None, on_change: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._holder = holder
        self._root = None if root is None else root.resolve()
        self._on_change = on_change

    async def load(self, call: LoadAdapter) -> bytes | str:
        """The digest of what is loaded now, or why it is not."""
        try:
            folder = self._allowed(call.folder)
            adapter = await asyncio.to_thread(self._holder.read_adapter, call.name, folder)
            if call.expected_digest not in (None, adapter.digest):
                return f"adapter {call.name!r}: the files differ from those that other workers have"
            await self._between_steps(lambda: self._holder.install_adapter(adapter))
        except AdapterError as error:
            return str(error).replace(str(self._root), "lora_dir")  # where it lies is not for the network
        self._on_change()
        return adapter.digest

    async def unload(self, call: UnloadAdapter) -> int:
        is_known = await self._between_steps(lambda: self._holder.remove_adapter(call.name))
        self._on_change()
        return int(is_known)

    async def _between_steps(self, change: Callable[[], T]) -> T:
        def run(engine: LLMEngine) -> T:
            result = change()
            engine.release_adapters()
            return result

        return await asyncio.wrap_future(self._engine.call(run))

    def _allowed(self, folder: str) -> Path:
        """Resolved, so that neither `..` nor a link leads out. Raises AdapterError."""
        if self._root is None:
            raise AdapterError("this worker loads no adapters at run time: lora_dir is not set")
        path = (self._root / folder).resolve()
        if not path.is_relative_to(self._root) or path == self._root:
            raise AdapterError("adapters are loaded from folders below lora_dir only")
        return path
