"""Everything between a planned round and the weights, put together: engine, backend, serving core.

`StackParts` is where a planted fault goes in: it replaces a collaborator, and no engine file knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cache_service.block_key import BlockKeyer, ModelIdentity
from cache_service.prefix_index import InMemoryPrefixIndex
from cluster.backend import Backend, ModelInfo
from cluster.experiment.targets.house_rules import catalog_with_template
from cluster.experiment.targets.step_backend import Mailboxes, StepBackend
from cluster.experiment.targets.weights import LoadedModel, WrapModel
from cluster.prompts.builder import PromptBuilder
from cluster.prompts.catalog import TemplateCatalog
from cluster.serving.core import ServedModel, ServingCore
from cluster.serving.token_table import TokenTable
from workers.build import EngineParts, build_engine
from workers.config import EngineConfig
from workers.engine import LLMEngine
from workers.step import ModelRunner

# The keys of an experiment leave this process as little as the engine itself does.
_SECRET = b"keys of an experiment in one process"


@dataclass(frozen=True, slots=True)
class StackParts:
    """The collaborators of one stack. The defaults are what a worker and a gateway use."""

    engine: EngineParts = field(default_factory=EngineParts)
    keyer: Callable[[bytes, ModelIdentity], BlockKeyer] = BlockKeyer
    wrap_model: WrapModel | None = None
    wrap_runner: Callable[[ModelRunner, EngineConfig], ModelRunner] | None = None
    token_table: Callable[[TokenTable], TokenTable] | None = None
    mailboxes: Callable[[], Mailboxes] = Mailboxes
    core: Callable[[list[ServedModel], Backend], ServingCore] = ServingCore
    index: Callable[[], InMemoryPrefixIndex] = InMemoryPrefixIndex  # of several stacks together


@dataclass(slots=True)
class Stack:
    """One engine life. `catalog` holds the registered template, where the traffic uses one."""

    engine: LLMEngine
    backend: StepBackend
    core: ServingCore
    catalog: TemplateCatalog | None = None


def build_stack(
    loaded: LoadedModel, config: EngineConfig, parts: StackParts | None = None, *, with_template: bool = False
) -> Stack:
    """A fresh engine with an empty pool over shared weights."""
    parts = parts or StackParts()
    runner: ModelRunner = loaded.make_runner(config, parts.wrap_model)
    if parts.wrap_runner is not None:
        runner = parts.wrap_runner(runner, config)
    keyer = parts.keyer(_SECRET, runner.identity)
    engine = build_engine(config, runner, keyer, parts.engine)
    backend = StepBackend(engine, parts.mailboxes())
    catalog = catalog_with_template(loaded.prompts.tokenizer, keyer) if with_template else None
    prompts = PromptBuilder(loaded.prompts.tokenizer, catalog=catalog) if catalog is not None else loaded.prompts
    tokens = loaded.tokens if parts.token_table is None else parts.token_table(loaded.tokens)
    info = ModelInfo(loaded.name, config.max_model_len, runner.vocab_size, runner.eos_token_ids)
    core = parts.core([ServedModel(info, prompts, tokens, keyer)], backend)
    return Stack(engine, backend, core, catalog)
