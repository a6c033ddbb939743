"""One loaded model for many engines: weights and tokenizer are shared, each runner gets a KV pool of its own.

A run needs several engines of the same model (the one under test, the clean reference, one per condition), and loading
takes longer than most of them live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.api.prompt import CallerIdentity
from cluster.api.scope import Scope, ScopeFields
from cluster.experiment.plan import PlannedRequest
from cluster.prompts.builder import PromptBuilder
from cluster.prompts.tokenizer import Tokenizer, load_tokenizer
from cluster.serving.token_table import TokenTable
from workers.config import EngineConfig
from workers.forward_model import ForwardModel
from workers.model_loader import load_runner, make_cache
from workers.model_runner import CpuModelRunner
from workers.runner_config import DtypeName, RunnerConfig

_NOBODY = CallerIdentity(bytes(32), bytes(32), ScopeFields(Scope.USER, bytes(32), user=bytes(32)))

_TEMPLATE_TOKENS = 240  # of the registered template, counted generously
_MAX_BATCHED_TOKENS = 512  # an engine's own default, and what its self-test covers
_MAX_SEQS = 64

WrapModel = Callable[[ForwardModel], ForwardModel]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`base` holds the weights; it is never run itself."""

    base: CpuModelRunner
    config: RunnerConfig
    prompts: PromptBuilder
    tokens: TokenTable

    @property
    def name(self) -> str:
        return self.base.source.name

    def num_blocks_of(self, request: PlannedRequest, block_size: int = 16) -> int:
        """Blocks that a request can come to hold, all choices to their full length."""
        turns = [{"role": role, "content": content} for role, content in request.messages]
        num_tokens = len(self.prompts.chat(_NOBODY, turns).token_ids) + _TEMPLATE_TOKENS * bool(request.region)
        return -(-(num_tokens + request.num_choices * request.max_tokens) // block_size) + request.num_choices

    def make_runner(self, engine: EngineConfig, wrap: WrapModel | None = None) -> CpuModelRunner:
        """A runner with the engine's pool size, block size and layout. `wrap` may stand around the forward pass."""
        config = replace(
            self.config, num_blocks=engine.num_blocks, block_size=engine.block_size, layout=engine.layout.value
        )
        model = self.base.model if wrap is None else wrap(self.base.model)
        return CpuModelRunner(config, model, make_cache(config, model), self.base.source, self.base.numerics)


def load_model(model: str | None = None, dtype: DtypeName = "auto", threads: int | None = None) -> LoadedModel:
    """Raises ModelSourceError when there is no such model."""
    config = RunnerConfig(
        model=model,
        dtype=dtype,
        threads=threads,
        num_blocks=1,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        max_num_seqs=_MAX_SEQS,
    )
    base = load_runner(config)
    tokenizer: Tokenizer = load_tokenizer(base.source.path)
    return LoadedModel(base, config, PromptBuilder(tokenizer), TokenTable.from_tokenizer(tokenizer.backend))
