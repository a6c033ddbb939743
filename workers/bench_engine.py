"""What the engine alone makes of unique prompts: no gateway, no router, no Ray. The measure of the cluster's own cost.

    python -m workers.bench_engine [--batching static] [--layout padded] [--mixed]

Prompts are random token ids, 48 of them with 300 tokens and 64 output tokens, 8 at a time: the shape of workload B of
`watchword bench`. `--mixed` draws prompt lengths from 20 to 580 tokens and output lengths from 8 to 120.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from cache_service.block_key import BlockKeyer
from cluster.api.ids import RequestId
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from workers.build import build_engine
from workers.config import Batching, EngineConfig, Layout
from workers.model_loader import load_runner
from workers.runner_config import RunnerConfig

NUM_REQUESTS, NUM_BLOCKS = 48, 2048


def make_requests(rng: random.Random, keyer: BlockKeyer, vocab_size: int, is_mixed: bool) -> list[Request]:
    tenant = bytes(keyer.identity("tenant", "bench"))
    requests = []
    for number in range(NUM_REQUESTS):
        user = bytes(keyer.identity("user", "bench", str(number)))
        spans = (ScopeSpan(None, ScopeFields(Scope.USER, tenant, user=user)),)
        num_prompt, num_output = (rng.randint(20, 580), rng.randint(8, 120)) if is_mixed else (300, 64)
        token_ids = tuple(rng.randrange(vocab_size) for _ in range(num_prompt))
        sampling = SamplingParams(max_tokens=num_output, seed=number, temperature=0.0, ignore_eos=True)
        keys = keyer.prompt_keys(token_ids, spans)
        requests.append(Request(RequestId(f"bench-{number}"), "bench", token_ids, sampling, spans, keys, tenant, user))
    return requests


def run(args: argparse.Namespace) -> dict[str, float | str]:
    """Keeps `max_num_seqs` requests in the engine until all are done."""
    runner = load_runner(
        RunnerConfig(num_blocks=NUM_BLOCKS, max_num_batched_tokens=512, threads=args.threads, layout=args.layout)
    )
    keyer = BlockKeyer(bytes(32), runner.identity)
    config = EngineConfig(
        num_blocks=NUM_BLOCKS,
        max_model_len=runner.max_model_len,
        max_num_seqs=args.max_num_seqs,
        batching=Batching(args.batching),
        layout=Layout(args.layout),
    )
    engine = build_engine(config, runner, keyer)
    waiting = make_requests(random.Random(args.seed), keyer, runner.vocab_size, args.mixed)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in waiting)
    num_alive = num_tokens = 0
    started = time.perf_counter()
    while waiting or num_alive:
        # Static batches are filled whole; continuous ones as places become free.
        while waiting and num_alive < args.max_num_seqs:
            engine.add_request(waiting.pop())
            num_alive += 1
        for output in engine.step():
            num_tokens += sum(len(delta.token_ids) for delta in output.deltas)
            num_alive -= output.finished
        engine.drain_events()
    seconds = time.perf_counter() - started
    return {
        "batching": args.batching,
        "layout": args.layout,
        "lengths": "mixed" if args.mixed else "equal",
        "output_tokens_per_s": round(num_tokens / seconds, 1),
        "prompt_tokens_per_s": round(num_prompt_tokens / seconds, 1),
        "engine_outside_runner": round(1 - engine.meter.busy_s / seconds, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batching", choices=["continuous", "static"], default="continuous")
    parser.add_argument("--layout", choices=["packed", "padded"], default="packed")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
