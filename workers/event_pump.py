"""Carries block events away from the step thread, in order and in batches."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from cache_service.events import BlockEvent

_log = logging.getLogger(__name__)


class EventPump:
    """While the consumer is busy events gather, so a slow consumer gets fewer, larger batches."""

    def __init__(self, on_events: Callable[[list[BlockEvent]], None]) -> None:
        self._on_events = on_events
        self._queue: queue.SimpleQueue[list[BlockEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, events: list[BlockEvent]) -> None:
        self._queue.put(events)

    def stop(self) -> None:
        """Delivers what is left, then returns."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch: list[BlockEvent] = []
            item = self._queue.get()
            while item is not None:
                batch.extend(item)
                if self._queue.empty():
                    break
                item = self._queue.get()
            is_open = item is not None
            if batch:
                self._deliver(batch)

    def _deliver(self, batch: list[BlockEvent]) -> None:
        try:
            self._on_events(batch)
        except Exception:
            # The index is a hint: losing it for a while must not stop the engine. A snapshot heals it.
            _log.exception("block events could not be delivered")
