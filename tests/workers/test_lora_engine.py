"""An adapter's blocks are its own: base and adapters never hit one another's, each hits its own, nor does a reload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine_builders import Transcript, make_request
from fake_runner import SECRET
from lora_builders import make_tensors, save_adapter
from model_builders import make_prompt, make_reference, make_runner, save_model

from cache_service.block_key import BlockKeyer
from cluster.api.request import Request
from workers.build import build_engine
from workers.config import EngineConfig
from workers.engine import LLMEngine
from workers.model_runner import CpuModelRunner

ADAPTERS = (None, "poet", "clerk")
PROMPT = make_prompt(50)
FULL_BLOCK_TOKENS = 48


def load(tmp_path: Path, seeds: tuple[int, int] = (1, 2)) -> CpuModelRunner:
    reference = make_reference("llama", tie_word_embeddings=False)
    adapters = tuple(
        (name, save_adapter(tmp_path / name, make_tensors(reference, seed)))
        for name, seed in zip(("poet", "clerk"), seeds, strict=True)
    )
    return make_runner(save_model(tmp_path / "model", reference), adapters=adapters, self_test=True)


def start(runner: CpuModelRunner) -> LLMEngine:
    config = EngineConfig(num_blocks=runner.num_blocks, max_model_len=512, max_num_batched_tokens=256, max_num_seqs=8)
    return build_engine(config, runner, BlockKeyer(SECRET, runner.identity))


def ask(engine: LLMEngine, name: str, adapter: str | None) -> Request:
    keyer = BlockKeyer(SECRET, engine.runner.identity)
    request = make_request(PROMPT, 6, request_id=name, keyer=keyer)
    digest = engine.runner.adapter_digest(adapter)
    return replace(request, adapter=adapter, block_keys=keyer.prompt_keys(PROMPT, request.spans, digest))


def run(engine: LLMEngine, *requests: Request) -> Transcript:
    transcript = Transcript()
    for request in requests:
        engine.add_request(request)
    for _ in range(200):
        transcript.add(engine.step())
        if len(transcript.finished) == len(requests):
            return transcript
    raise AssertionError("requests do not end")


def test_caches_of_base_and_adapters_are_disjoint_and_work(tmp_path: Path) -> None:
    engine = start(load(tmp_path))
    tokens = {}
    for adapter in ADAPTERS:  # each meets the others' blocks of the same tokens and user, and takes none
        seen = run(engine, ask(engine, f"first-{adapter}", adapter))
        assert seen.cached[f"first-{adapter}"] == 0, adapter
        tokens[adapter] = dict(seen.tokens[f"first-{adapter}"])
    for adapter in ADAPTERS:  # its own it does take
        seen = run(engine, ask(engine, f"again-{adapter}", adapter))
        assert seen.cached[f"again-{adapter}"] == FULL_BLOCK_TOKENS, adapter
        assert dict(seen.tokens[f"again-{adapter}"]) == tokens[adapter]
    assert len({str(said) for said in tokens.values()}) == 3
    together = run(engine, *(ask(engine, f"with-{adapter}", adapter) for adapter in ADAPTERS))
    for adapter in ADAPTERS:
        assert dict(together.tokens[f"with-{adapter}"]) == tokens[adapter]


def test_a_reload_under_the_same_name_has_keys_of_its_own(tmp_path: Path) -> None:
    before = load(tmp_path)
    old = [ask(start(before), "old", adapter).block_keys for adapter in ADAPTERS]
    after = load(tmp_path, seeds=(3, 2))
    new = [ask(start(after), "new", adapter).block_keys for adapter in ADAPTERS]
    assert [ours == theirs for ours, theirs in zip(old, new, strict=True)] == [True, False, True]
    assert not set(old[1]) & set(new[1])


def test_keys_of_the_old_content_hit_nothing_of_the_new(tmp_path: Path) -> None:
    """A gateway that has not heard of the reload still names the old digest: content is compared, so nothing leaks."""
    stale = ask(start(load(tmp_path)), "stale", "poet")
    engine = start(load(tmp_path, seeds=(3, 2)))
    run(engine, ask(engine, "fresh", "poet"))
    fresh = run(engine, ask(engine, "fresh-again", "poet"))
    assert fresh.cached["fresh-again"] == FULL_BLOCK_TOKENS
    seen = run(engine, stale)
    assert seen.cached["stale"] == 0
    assert dict(seen.tokens["stale"]) == dict(fresh.tokens["fresh-again"])
