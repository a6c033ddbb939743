"""Keeps every worker's pinned template blocks equal to what the catalog says, new workers before they take traffic.

Template blocks are written here and nowhere else, so whether they hit does not depend on what any user did.
"""

from __future__ import annotations

import asyncio
import logging

from cache_service.block_key import BlockKeyer
from cluster.api.channel import KeepPins, WarmUp
from cluster.api.errors import UnavailableError
from cluster.api.ids import BlockKey, WorkerId, new_request_id
from cluster.api.prompt import BuiltPrompt
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.api.worker_state import WorkerInfo
from cluster.control_client import ControlCalls
from cluster.prompts.catalog import TemplateCatalog

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
Chain = tuple[BlockKey, ...]


class TemplateWarmer:
    """`run` looks once a second; `sync` does it now and returns when every reachable worker is up to date."""

    def __init__(self, catalog: TemplateCatalog, keyer: BlockKeyer, control: ControlCalls, model: str) -> None:
        self._catalog = catalog
        self._keyer = keyer
        self._control = control
        self._model = model
        self._held: dict[tuple[WorkerId, str], frozenset[Chain]] = {}  # by worker and epoch
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        while True:
            try:
                await self.sync()
            except Exception:
                logger.exception("template warm-up failed; trying again")
            await asyncio.sleep(PERIOD_S)

    async def sync(self) -> None:
        async with self._lock:
            prompts = await asyncio.to_thread(self._wanted)
            members = self._control.members
            current = {(worker.worker_id, worker.epoch) for worker in members}
            self._held = {life: chains for life, chains in self._held.items() if life in current}
            await asyncio.gather(*(self._sync_worker(worker, prompts) for worker in members))

    def _wanted(self) -> dict[Chain, BuiltPrompt]:
        self._catalog.refresh_clocks()
        return {self._keyer.prompt_keys(each.token_ids, each.spans): each for each in self._catalog.all_warm_ups()}

    async def _sync_worker(self, worker: WorkerInfo, wanted: dict[Chain, BuiltPrompt]) -> None:
        life = (worker.worker_id, worker.epoch)
        held = self._held.get(life)
        if held is not None and held == wanted.keys():
            return
        missing = [prompt for chain, prompt in wanted.items() if held is None or chain not in held]
        try:
            if held is None or held - wanted.keys():
                await self._control.call(worker, KeepPins(frozenset(key for chain in wanted for key in chain)))
            num_pinned = await self._control.call(worker, WarmUp(tuple(self._request(prompt) for prompt in missing)))
        except UnavailableError as error:
            logger.warning("%s; it gets its templates with the next look", error.message)
            return
        num_wanted = sum(len(prompt.token_ids) for prompt in missing) // self._keyer.block_size
        if num_pinned != num_wanted:
            logger.warning("%s pinned %s of %d template blocks", worker.worker_id, num_pinned, num_wanted)
        self._held[life] = frozenset(wanted)

    def _request(self, prompt: BuiltPrompt) -> Request:
        private = prompt.spans[-1].fields
        assert private.tenant is not None
        assert private.user is not None
        return Request(
            request_id=new_request_id(),
            model=self._model,
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True),
            spans=prompt.spans,
            block_keys=self._keyer.prompt_keys(prompt.token_ids, prompt.spans),
            tenant_hash=private.tenant,
            user_hash=private.user,
        )
