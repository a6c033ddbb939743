"""Puts an engine together. The only place that chooses which class plays which part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cache_service.block_key import BlockKeyer
from workers.block_pool import BlockPool, ChecksumBlocks
from workers.config import EngineConfig
from workers.engine import LLMEngine
from workers.event_log import BlockEventLog
from workers.isolation_check import IsolationChecker
from workers.output_builder import OutputBuilder
from workers.poison import Poisoner
from workers.publisher import Publisher
from workers.scheduler import Scheduler
from workers.step import ModelRunner
from workers.step_builder import StepBuilder
from workers.stop_check import StopCheck
from workers.window_pages import WindowPages


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The engine's collaborators: classes, or factories with the same parameters."""

    event_log: Callable[[int], BlockEventLog] = BlockEventLog
    block_pool: Callable[[EngineConfig, BlockEventLog, ChecksumBlocks | None], BlockPool] = BlockPool
    scheduler: Callable[[EngineConfig, BlockPool], Scheduler] = Scheduler
    step_builder: Callable[[], StepBuilder] = StepBuilder
    publisher: Callable[[EngineConfig, BlockPool, BlockKeyer], Publisher] = Publisher
    output_builder: Callable[[], OutputBuilder] = OutputBuilder
    stop_check: Callable[[frozenset[int], int], StopCheck] = StopCheck
    checker: Callable[[EngineConfig, BlockPool], IsolationChecker] = IsolationChecker
    poisoner: Callable[[BlockPool, ModelRunner, float], Poisoner] = Poisoner
    clock: Callable[[], float] = time.time


def build_engine(
    config: EngineConfig, runner: ModelRunner, keyer: BlockKeyer, parts: EngineParts | None = None
) -> LLMEngine:
    """Raises ValueError when config, runner and keyer do not fit together."""
    _check_fit(config, runner, keyer)
    parts = parts or EngineParts()
    log = parts.event_log(config.event_log_size)
    checksum = runner.checksum_blocks if config.checksum_blocks else None
    pool = parts.block_pool(config, log, checksum)
    if runner.window is not None:
        pool.use_pages(WindowPages(runner.window, config, checksum))
    return LLMEngine(
        config=config,
        runner=runner,
        keyer=keyer,
        pool=pool,
        scheduler=parts.scheduler(config, pool),
        step_builder=parts.step_builder(),
        publisher=parts.publisher(config, pool, keyer),
        output_builder=parts.output_builder(),
        stop_check=parts.stop_check(runner.eos_token_ids, config.max_model_len),
        checker=parts.checker(config, pool),
        poisoner=parts.poisoner(pool, runner, config.poison_value),
        event_log=log,
        clock=parts.clock,
    )


def _check_fit(config: EngineConfig, runner: ModelRunner, keyer: BlockKeyer) -> None:
    sizes = {config.block_size, runner.block_size, keyer.block_size}
    if len(sizes) != 1:
        raise ValueError(f"block sizes of config, runner and keyer differ: {sorted(sizes)}")
    if config.num_blocks > runner.num_blocks:
        raise ValueError(f"num_blocks is {config.num_blocks}, the runner has {runner.num_blocks}")
    if config.max_model_len > runner.max_model_len:
        raise ValueError(f"max_model_len is {config.max_model_len}, the model's limit is {runner.max_model_len}")
    if keyer.model != runner.identity:
        raise ValueError("the keyer was made for another model than the runner's")
