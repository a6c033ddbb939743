"""The reference of the exactness oracle: each request alone on an empty, clean engine. Answers are remembered."""

from __future__ import annotations

from dataclasses import replace

from cluster.api.ids import new_request_id
from cluster.experiment.observation import Observation
from cluster.experiment.plan import PlannedRequest
from cluster.experiment.targets.round_driver import RoundDriver
from cluster.experiment.targets.stack import build_stack
from cluster.experiment.targets.weights import LoadedModel
from workers.config import EngineConfig, Layout


class SoloEngine:
    """Implements SoloReference. No prefix cache and no neighbour, so that nothing can be shared."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, with_template: bool = False) -> None:
        clean = replace(config, prefix_caching=False, layout=Layout.PACKED, check_conservation=False)
        self._stack = build_stack(loaded, clean, with_template=with_template)
        self._known: dict[PlannedRequest, Observation] = {}

    async def solo(self, request: PlannedRequest) -> Observation:
        # When it arrives and how its answer is carried must not matter, and an abort only cuts the answer short.
        alone = replace(request, arrival_step=0, stream=False, abort_after_tokens=None)
        if alone not in self._known:
            driver = RoundDriver(self._stack.core, self._stack.backend, lambda name: new_request_id())
            self._known[alone] = (await driver.run([alone]))[alone.name]
            self._stack.backend.forget()
        return self._known[alone]
