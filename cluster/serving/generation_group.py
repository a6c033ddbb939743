"""Several generations of one HTTP request (a list of prompts) as one stream of deltas with running indices."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from cluster.serving.generation import Generation
from cluster.serving.text_delta import TextDelta, Usage

_QUEUE_SIZE = 64  # deltas; a slow reader makes the generations wait, their workers batch tokens meanwhile


class GenerationGroup:
    """Choice c of prompt p has index p * n + c. An error of one generation ends the group."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        assert generations
        self._generations = tuple(generations)

    @property
    def num_choices(self) -> int:
        return sum(generation.num_choices for generation in self._generations)

    @property
    def usage(self) -> Usage:
        counts = [generation.usage for generation in self._generations]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in counts),
            completion_tokens=sum(usage.completion_tokens for usage in counts),
            cached_tokens=sum(usage.cached_tokens for usage in counts),
        )

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Of the generations placed so far, each worker once."""
        placed = (generation.placement.worker_id for generation in self._generations)
        return tuple(dict.fromkeys(worker_id for worker_id in placed if worker_id is not None))

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Closing this iterator, or cancelling whoever waits in it, aborts everything that still runs."""
        if len(self._generations) == 1:
            generation = self._generations[0]
            try:
                async for delta in generation:
                    yield delta
            finally:
                await generation.aclose()
            return
        queue: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue(_QUEUE_SIZE)
        tasks = self._start(queue)
        try:
            num_running = len(tasks)
            while num_running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, queue: asyncio.Queue[TextDelta | BaseException | None]) -> list[asyncio.Task[None]]:
        tasks = []
        offset = 0
        for generation in self._generations:
            # A context of its own: a backend may keep per-request state in context variables.
            context = contextvars.Context()
            tasks.append(asyncio.create_task(_pump(generation, offset, queue), context=context))
            offset += generation.num_choices
        return tasks


async def _pump(generation: Generation, offset: int, queue: asyncio.Queue[TextDelta | BaseException | None]) -> None:
    try:
        async for delta in generation:
            await queue.put(replace(delta, index=offset + delta.index))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
    finally:
        await generation.aclose()
