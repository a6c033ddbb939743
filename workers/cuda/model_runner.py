"""Runs steps on a GPU. As the CPU runner, but tokens are drawn on the device and only they come back."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from workers.cuda.decode import DecodeSteps
from workers.cuda.sampling import draw_tokens, is_drawn_on_device, make_draws
from workers.cuda.triton_model import TritonModel
from workers.kv_cache import KVCache
from workers.model.batch import build_batch
from workers.model.lora import LoraAdapter
from workers.model_runner import CpuModelRunner
from workers.model_source import ModelSource
from workers.runner_config import RunnerConfig
from workers.step import SampledToken, SampleInput, StepInput, StepOutput, StepRow

logger = logging.getLogger(__name__)


class CudaModelRunner(CpuModelRunner):
    """The ModelRunner of workers/step.py on one device. Without `decode` every step is launched kernel by kernel."""

    def __init__(
        self,
        config: RunnerConfig,
        model: TritonModel,
        cache: KVCache,
        source: ModelSource,
        numerics: str,
        adapters: Sequence[LoraAdapter] = (),
        decode: DecodeSteps | None = None,
    ) -> None:
        super().__init__(config, model, cache, source, numerics, adapters)
        self._triton_model, self._decode = model, decode

    def execute(self, step: StepInput) -> StepOutput:
        self._cache.copy(step.block_copies)
        self._cache.copy_pages(step.page_copies)
        if not step.rows:
            return StepOutput([])
        logits = self.compute_logits(step)
        sampling = [row.samples for row in step.rows if row.samples]
        drawn = iter(self._draw(logits, sampling))
        return StepOutput([next(drawn) if row.samples else [] for row in step.rows])

    def compute_logits(self, step: StepInput) -> torch.Tensor:
        """The step without copies and sampling: float32 [rows that sample, vocab] on the device, until the next call.

        Memory for the largest step is set aside at start. Where another process has taken it since, rows go one by one.
        """
        self._resolve_adapters(step.rows)
        try:
            return self._compute(step.rows)
        except torch.OutOfMemoryError:
            logger.warning("device memory is short: %d rows are computed one by one", len(step.rows))
            torch.cuda.empty_cache()
            return torch.cat([self._compute([row]).clone() for row in step.rows])

    def _compute(self, rows: list[StepRow]) -> torch.Tensor:
        batch = build_batch(rows, self.block_size, self._config.layout, self._model.row_tile.pad)
        assert (batch.windowed is None) == (self.window is None), "rows without pages, or pages without a pool"
        if self._decode is not None and self._decode.fits(batch):
            return self._decode.run(batch)
        return self._triton_model.forward(batch, self._cache)

    def _draw(self, logits: torch.Tensor, sampling: list[tuple[SampleInput, ...]]) -> list[list[SampledToken]]:
        """Waits for the device once, for the tokens; rows that ask for more than a token come along."""
        on_device = [(index, one) for index, inputs in enumerate(sampling) for one in inputs if is_drawn_on_device(one)]
        on_host = [index for index, inputs in enumerate(sampling) if not all(map(is_drawn_on_device, inputs))]
        tokens: torch.Tensor | None = None
        if on_device:
            tokens = draw_tokens(logits, make_draws(on_device, logits.device))
        read_back: dict[int, np.ndarray] = {}
        if on_host:
            wanted = torch.tensor(on_host, device=logits.device)
            read_back = dict(zip(on_host, logits[wanted].cpu().numpy(), strict=True))
        drawn = iter(tokens.tolist() if tokens is not None else ())
        return [
            [
                SampledToken(next(drawn))
                if is_drawn_on_device(one)
                else self._sampler.sample(read_back[index], (one,))[0]
                for one in inputs
            ]
            for index, inputs in enumerate(sampling)
        ]
