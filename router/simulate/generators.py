"""Made-up traffic, each kind a different structure of shared prefixes. Lengths are in blocks of `BLOCK_TOKENS`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from router.simulate.trace import TraceRequest

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class GeneratorConfig:
    """`rate_per_s` counts requests of all users together."""

    num_requests: int = 10_000
    rate_per_s: float = 12.0
    seed: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= 100_000_000:
            raise ValueError(f"num_requests is {self.num_requests}, allowed are 1 to 100000000")
        if not 0 < self.rate_per_s <= 1e6:
            raise ValueError(f"rate_per_s is {self.rate_per_s}, allowed are values above 0 up to 1e6")


def _poisson(config: GeneratorConfig, random: Random) -> Iterator[float]:
    now_s = 0.0
    for _ in range(config.num_requests):
        now_s += random.expovariate(config.rate_per_s)
        yield now_s


def _request(arrival_s: float, block_ids: tuple[int, ...], num_output: int, session: int | None = None) -> TraceRequest:
    return TraceRequest(arrival_s, len(block_ids) * BLOCK_TOKENS, num_output, block_ids, session=session)


def prefix_repetition(
    config: GeneratorConfig,
    *,
    num_prefixes: int = 150,
    prefix_blocks: int = 12,
    unique_blocks: int = 3,
    zipf: float = 0.0,
    num_output: int = 128,
) -> list[TraceRequest]:
    """Shared system prompts, each with a question of its own. `zipf` 0: all as often; 1.6: one half of the time."""
    random = Random(config.seed)
    fresh = count()
    prefixes = [tuple(next(fresh) for _ in range(prefix_blocks)) for _ in range(num_prefixes)]
    weights = [1.0 / rank**zipf for rank in range(1, num_prefixes + 1)]
    chosen = random.choices(prefixes, weights, k=config.num_requests)
    return [
        _request(arrival_s, prefix + tuple(next(fresh) for _ in range(unique_blocks)), num_output)
        for arrival_s, prefix in zip(_poisson(config, random), chosen, strict=True)
    ]


def multi_turn(
    config: GeneratorConfig,
    *,
    system_blocks: int = 2,
    turn_blocks: int = 2,
    mean_turns: float = 6.0,
    think_s: float = 20.0,
    num_output: int = 256,
) -> list[TraceRequest]:
    """Conversations with one common system prompt; each turn brings the whole history and something new."""
    random = Random(config.seed)
    fresh = count()
    system = tuple(next(fresh) for _ in range(system_blocks))

    def next_turn(history: tuple[int, ...]) -> tuple[int, ...]:
        return history + tuple(next(fresh) for _ in range(turn_blocks))

    def goes_on() -> bool:
        return random.random() < 1.0 - 1.0 / mean_turns

    return _sessions(
        config, random, config.rate_per_s / mean_turns, lambda: system, next_turn, goes_on, think_s, num_output
    )


def agents(
    config: GeneratorConfig,
    *,
    num_tools: int = 20,
    tool_blocks: int = 8,
    step_blocks: int = 1,
    mean_steps: float = 15.0,
    step_s: float = 2.0,
    num_output: int = 96,
) -> list[TraceRequest]:
    """Agents: long tool descriptions shared by all runs of one agent, many short steps in quick succession."""
    random = Random(config.seed)
    fresh = count()
    tools = [tuple(next(fresh) for _ in range(tool_blocks)) for _ in range(num_tools)]

    def next_step(history: tuple[int, ...]) -> tuple[int, ...]:
        return history + tuple(next(fresh) for _ in range(step_blocks))

    def goes_on() -> bool:
        return random.random() < 1.0 - 1.0 / mean_steps

    begin = lambda: random.choice(tools)  # noqa: E731  passed on by name just below
    return _sessions(config, random, config.rate_per_s / mean_steps, begin, next_step, goes_on, step_s, num_output)


def unique_prompts(config: GeneratorConfig, *, prompt_blocks: int = 12, num_output: int = 128) -> list[TraceRequest]:
    """Nothing is shared: here no router can gain anything from prefixes."""
    random = Random(config.seed)
    fresh = count()
    return [
        _request(arrival_s, tuple(next(fresh) for _ in range(prompt_blocks)), num_output)
        for arrival_s in _poisson(config, random)
    ]


def tenants(
    config: GeneratorConfig, *, num_tenants: int = 4, flood_share: float = 0.7, num_output: int = 128
) -> list[TraceRequest]:
    """Tenant 0 floods with long prompts that share nothing; the others converse. No block is common to two."""
    random = Random(config.seed)
    flood = replace(
        config, num_requests=int(config.num_requests * flood_share), rate_per_s=config.rate_per_s * flood_share
    )
    parts = [unique_prompts(flood, prompt_blocks=16, num_output=num_output)]
    quiet = (config.num_requests - flood.num_requests) // max(1, num_tenants - 1)
    for _ in range(num_tenants - 1):
        rate = config.rate_per_s * (1 - flood_share) / max(1, num_tenants - 1)
        part = GeneratorConfig(max(1, quiet), rate, seed=random.randrange(2**31))
        parts.append(multi_turn(part, num_output=num_output))
    requests = []
    for tenant, part_requests in enumerate(parts):
        requests += [
            replace(r, tenant=tenant, block_ids=tuple(block * num_tenants + tenant for block in r.block_ids))
            for r in part_requests
        ]
    return sorted(requests, key=lambda request: request.arrival_s)


def _sessions(
    config: GeneratorConfig,
    random: Random,
    sessions_per_s: float,
    begin: Callable[[], tuple[int, ...]],
    next_turn: Callable[[tuple[int, ...]], tuple[int, ...]],
    goes_on: Callable[[], bool],
    pause_s: float,
    num_output: int,
) -> list[TraceRequest]:
    """Sessions that start at random and go on after pauses of random length, interleaved in time.

    The first begin long before time 0, so that the rate is steady from there on.
    """
    due: list[tuple[float, int, tuple[int, ...]]] = []  # (time, session, history)
    start_s = -5.0 * pause_s * config.rate_per_s / sessions_per_s
    session = 0
    requests: list[TraceRequest] = []
    while len(requests) < config.num_requests:
        if not due or start_s <= due[0][0]:
            heapq.heappush(due, (start_s, session, begin()))
            session += 1
            start_s += random.expovariate(sessions_per_s)
            continue
        now_s, number, history = heapq.heappop(due)
        prompt = next_turn(history)
        if now_s >= 0.0:
            requests.append(_request(now_s, prompt, num_output, session=number))
        if goes_on():
            heapq.heappush(due, (now_s + random.expovariate(1.0 / pause_s), number, prompt))
    return requests


GENERATORS: dict[str, Callable[[GeneratorConfig], list[TraceRequest]]] = {
    "prefix-repetition": prefix_repetition,
    "zipf-1.0": lambda config: prefix_repetition(config, zipf=1.0),
    "zipf-1.6": lambda config: prefix_repetition(config, zipf=1.6),
    "multi-turn": multi_turn,
    "agents": agents,
    "unique": unique_prompts,
    "tenants": tenants,
}
