"""The engine on a thread of its own: submitting never waits for a step, and a step never waits for a consumer."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from cache_service.events import BlockEvent
from cluster.api.errors import InternalError, UnavailableError, WatchwordError
from cluster.api.ids import RequestId
from cluster.api.output import RequestOutput
from cluster.api.request import Request
from workers.engine import LLMEngine
from workers.event_pump import EventPump

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Command:
    """Work for the step thread between two steps, and what to do if the engine ends before it could run."""

    run: Callable[[], None]
    refuse: Callable[[WatchwordError], None]


class AsyncLLMEngine:
    """Owns the engine from `start` on: nobody else may touch it, except through `call`.

    `on_outputs` gets all news of one step in one call, on the step thread: it should only hand over. `on_events` gets
    block events in order, in batches, on another thread, where it may take its time.
    """

    def __init__(
        self,
        engine: LLMEngine,
        on_outputs: Callable[[list[RequestOutput]], None],
        on_events: Callable[[list[BlockEvent]], None] | None = None,
    ) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._pump = EventPump(on_events) if on_events is not None else None
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()  # makes "is it closed? else put" one act; never held during a step
        self._closed: WatchwordError | None = None  # why nothing is accepted any more
        self._is_draining = False
        self._refusals: list[RequestOutput] = []

    @property
    def is_dead(self) -> bool:
        """True once a step has crashed: the worker must be restarted."""
        return isinstance(self._closed, InternalError)

    @property
    def thread_id(self) -> int:
        """The system's id of the step thread, once it has been started."""
        assert self._thread.native_id is not None
        return self._thread.native_id

    def start(self) -> None:
        if self._pump is not None:
            self._pump.start()
        self._thread.start()

    def submit(self, request: Request, *, is_warm_up: bool = False) -> None:
        """Thread-safe. What the engine refuses comes back as an output with `error`. Raises UnavailableError when
        stopping, InternalError when dead."""

        def refuse(error: WatchwordError) -> None:
            self._refusals.append(RequestOutput(request.request_id, finished=True, error=error))

        def add() -> None:
            try:
                if not self._engine.is_healthy:
                    raise UnavailableError("the worker is quarantined")
                self._engine.add_request(request, is_warm_up=is_warm_up)
            except WatchwordError as error:
                refuse(error)

        if self._is_draining and self._closed is None:
            raise UnavailableError("the worker is shutting down", retry_after_s=1.0)
        self._put(_Command(add, refuse))

    def abort(self, request_id: RequestId) -> None:
        """Thread-safe; takes effect before the next step. Unknown ids are ignored."""
        with self._lock:
            if self._closed is None:
                self._commands.put(_Command(lambda: self._engine.abort(request_id), lambda error: None))

    def call(self, function: Callable[[LLMEngine], T]) -> Future[T]:
        """Runs `function` on the step thread between two steps: for load figures, snapshots, purges. Thread-safe."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._engine))
                except Exception as error:
                    future.set_exception(error)

        def refuse(error: WatchwordError) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._put(_Command(run, refuse))
        return future

    def stop(self, timeout_s: float | None = None) -> bool:
        """Accepts nothing new, finishes what is running, delivers all events. After `timeout_s` aborts the rest.

        Returns whether everything could finish in time.
        """
        self._is_draining = True
        self._wake(lambda: None)
        self._thread.join(timeout_s)
        is_in_time = not self._thread.is_alive()
        if not is_in_time:
            self._wake(self._engine.abort_all)
            self._thread.join()
        return is_in_time

    # --- the step thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._deliver(self._engine.step())
            self._close(UnavailableError("the worker has shut down", retry_after_s=1.0))
            self._deliver([])
        except Exception:
            _log.exception("the engine's step thread failed")
            self._close(InternalError("the engine failed"))
            self._report_crash()
        finally:
            if self._pump is not None:
                self._pump.stop()

    def _run_commands(self) -> bool:
        """Takes in everything that has arrived; waits only when there is nothing to compute. False: time to end."""
        is_idle = not self._engine.has_work and not self._refusals
        if is_idle and self._is_draining and self._commands.empty():
            return False
        if is_idle:
            self._commands.get().run()
        while not self._commands.empty():
            self._commands.get().run()
        return True

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        if self._refusals:
            outputs = [*self._refusals, *outputs]
            self._refusals = []
        if outputs:
            self._on_outputs(outputs)
        events = self._engine.drain_events()
        if events and self._pump is not None:
            self._pump.put(events)

    def _close(self, reason: WatchwordError) -> None:
        with self._lock:
            self._closed = reason
        while not self._commands.empty():
            self._commands.get().refuse(reason)

    def _report_crash(self) -> None:
        """Every request learns that it failed, and nothing else."""
        try:
            self._on_outputs([*self._refusals, *self._engine.fail_all()])
        except Exception:
            _log.exception("the failure could not be reported")

    def _put(self, command: _Command) -> None:
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self._commands.put(command)

    def _wake(self, run: Callable[[], None]) -> None:
        with self._lock:
            if self._closed is None:
                self._commands.put(_Command(run, lambda error: None))
