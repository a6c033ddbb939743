"""Adapters that come, change and go while the engine runs: no stale hit, and nobody's weights change under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from engine_builders import Transcript, make_request
from fake_runner import SECRET
from lora_builders import make_tensors, save_adapter
from model_builders import make_prompt, make_reference, make_runner, save_model

from cache_service.block_key import BlockKeyer
from cluster.api.channel import LoadAdapter, UnloadAdapter
from cluster.api.errors import NotFoundError, UnavailableError
from cluster.api.request import Request
from workers.adapter_loader import AdapterLoader
from workers.async_engine import AsyncLLMEngine
from workers.build import build_engine
from workers.config import EngineConfig
from workers.engine import LLMEngine
from workers.model_runner import CpuModelRunner

PROMPT = make_prompt(50)
FULL_BLOCK_TOKENS = 48


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), make_reference("llama", tie_word_embeddings=False))


@pytest.fixture
def runner(model_folder: Path) -> CpuModelRunner:
    return make_runner(model_folder, may_load_adapters=True, self_test=True)


def write(folder: Path, name: str, seed: int) -> Path:
    save_adapter(folder / name, make_tensors(make_reference("llama", tie_word_embeddings=False), seed))
    return folder / name


def load(runner: CpuModelRunner, name: str, folder: Path) -> bytes:
    adapter = runner.read_adapter(name, folder)
    runner.install_adapter(adapter)
    return adapter.digest


def start(runner: CpuModelRunner, keyer: type[BlockKeyer] = BlockKeyer) -> LLMEngine:
    config = EngineConfig(num_blocks=runner.num_blocks, max_model_len=512, max_num_batched_tokens=256, max_num_seqs=8)
    return build_engine(config, runner, keyer(SECRET, runner.identity))


def ask(engine: LLMEngine, name: str, adapter: str | None, keyer: type[BlockKeyer] = BlockKeyer) -> Request:
    keys = keyer(SECRET, engine.runner.identity)
    request = make_request(PROMPT, 6, request_id=name, keyer=keys)
    digest = engine.runner.adapter_digest(adapter)
    block_keys = keys.prompt_keys(PROMPT, request.spans, digest)
    return replace(request, adapter=adapter, adapter_digest=digest, block_keys=block_keys)


def run(engine: LLMEngine, *requests: Request) -> Transcript:
    transcript = Transcript()
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        transcript.add(engine.step())
    return transcript


def test_base_and_two_adapters_loaded_at_run_time_share_a_batch_and_no_block(
    runner: CpuModelRunner, tmp_path: Path
) -> None:
    engine = start(runner)
    alone = {"base": run(engine, ask(engine, "base", None)).of(ask(engine, "base", None))}
    for seed, name in enumerate(("poet", "clerk"), start=1):
        load(runner, name, write(tmp_path, name, seed))
        request = ask(engine, name, name)
        transcript = run(engine, request)
        assert transcript.cached[name] == 0
        alone[name] = transcript.of(request)
    assert len({str(tokens) for tokens in alone.values()}) == 3
    together = [ask(engine, f"{name}-2", None if name == "base" else name) for name in alone]
    transcript = run(engine, *together)
    assert [transcript.of(request) for request in together] == list(alone.values())
    assert set(transcript.cached.values()) == {FULL_BLOCK_TOKENS}


def test_a_reload_hits_nothing_of_what_the_name_stood_for(runner: CpuModelRunner, tmp_path: Path) -> None:
    engine = start(runner)
    old_digest = load(runner, "poet", write(tmp_path, "poet", 1))
    old = ask(engine, "old", "poet")
    old_tokens = run(engine, old).of(old)
    assert load(runner, "poet", write(tmp_path, "poet", 2)) != old_digest
    new = ask(engine, "new", "poet")
    transcript = run(engine, new)
    assert transcript.cached["new"] == 0
    assert transcript.of(new) != old_tokens
    load(runner, "poet", write(tmp_path, "poet", 1))  # the old content again: its blocks are right again
    back = ask(engine, "back", "poet")
    transcript = run(engine, back)
    assert transcript.cached["back"] == FULL_BLOCK_TOKENS
    assert transcript.of(back) == old_tokens


class ForgetfulKeyer(BlockKeyer):
    """Leaves the adapter out of the key."""

    def child(self, parent, fields, token_ids, adapter_digest=None):
        return super().child(parent, fields, token_ids, None)


class ForgetfulRunner:
    """Says that an adapter's content is what its name is: the digest never changes."""

    def __init__(self, inner: CpuModelRunner) -> None:
        self._inner = inner

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def adapter_digest(self, adapter: str | None) -> bytes | None:
        return None if adapter is None else adapter.encode()

    def execute(self, step):
        for row in step.rows:
            row.adapter_digest = self._inner.adapter_digest(row.adapter)
        return self._inner.execute(step)

    def release_adapters(self, in_use) -> None:
        pass


def test_a_stale_hit_would_be_seen(runner: CpuModelRunner, tmp_path: Path) -> None:
    """The positive control: without the content in key and comparison the reload hits, and answers otherwise."""
    load(runner, "poet", write(tmp_path, "poet", 1))
    engine = start(ForgetfulRunner(runner))  # type: ignore[arg-type]
    run(engine, ask(engine, "old", "poet"))
    load(runner, "poet", write(tmp_path, "poet", 2))
    stale = ask(engine, "stale", "poet")
    transcript = run(engine, stale)
    fresh_engine = start(runner)  # only now, since it writes to the same memory
    right = ask(fresh_engine, "right", "poet")
    right_tokens = run(fresh_engine, right).of(right)
    assert transcript.cached["stale"] == FULL_BLOCK_TOKENS
    assert transcript.of(stale) != right_tokens


def test_with_the_digest_missing_from_the_key_the_comparison_still_refuses(
    runner: CpuModelRunner, tmp_path: Path
) -> None:
    engine = start(runner, ForgetfulKeyer)
    load(runner, "poet", write(tmp_path, "poet", 1))
    run(engine, ask(engine, "old", "poet", ForgetfulKeyer))
    load(runner, "poet", write(tmp_path, "poet", 2))
    assert run(engine, ask(engine, "new", "poet", ForgetfulKeyer)).cached["new"] == 0
    assert engine.pool.cache.counters.verify_failures == 1


def test_a_running_request_keeps_its_weights_and_they_go_with_it(runner: CpuModelRunner, tmp_path: Path) -> None:
    engine = start(runner)
    load(runner, "poet", write(tmp_path, "poet", 1))
    undisturbed = ask(engine, "undisturbed", "poet")
    expected = run(engine, undisturbed).of(undisturbed)
    for change in ("replaced", "removed"):
        load(runner, "poet", write(tmp_path, "poet", 1))
        request = ask(engine, change, "poet")
        engine.add_request(request)
        transcript = Transcript()
        for _ in range(3):
            transcript.add(engine.step())
        if change == "replaced":
            load(runner, "poet", write(tmp_path, "poet", 2))
        else:
            assert runner.remove_adapter("poet")
        engine.release_adapters()
        assert request.adapter_digest in runner._loaded_digests
        while engine.has_work:
            transcript.add(engine.step())
        assert transcript.of(request) == expected
        assert request.adapter_digest not in runner._loaded_digests
    with pytest.raises(NotFoundError):
        engine.add_request(request)


def test_a_request_for_other_content_than_is_loaded_is_refused(runner: CpuModelRunner, tmp_path: Path) -> None:
    """A gateway that has not heard of the reload, or a stream that moves to a worker with another adapter."""
    engine = start(runner)
    load(runner, "poet", write(tmp_path, "poet", 1))
    late = ask(engine, "late", "poet")
    load(runner, "poet", write(tmp_path, "poet", 2))
    with pytest.raises(UnavailableError, match="adapter was replaced"):
        engine.add_request(late)


# --- what a worker does when it is asked to


@dataclass
class LoaderRig:
    loader: AdapterLoader
    runner: CpuModelRunner
    folder: Path
    num_changes: int = 0


@asynccontextmanager
async def loader_rig(runner: CpuModelRunner, folder: Path, root: Path | None) -> AsyncIterator[LoaderRig]:
    engine = AsyncLLMEngine(start(runner), lambda outputs: None)
    engine.start()
    rig = LoaderRig(None, runner, folder)  # type: ignore[arg-type]

    def note() -> None:
        rig.num_changes += 1

    rig.loader = AdapterLoader(engine, runner, root, note)
    try:
        yield rig
    finally:
        await asyncio.to_thread(engine.stop)


async def test_a_worker_loads_replaces_and_unloads(runner: CpuModelRunner, tmp_path: Path) -> None:
    async with loader_rig(runner, tmp_path, tmp_path) as rig:
        write(tmp_path, "poet", 1)
        first = await rig.loader.load(LoadAdapter("verse", "poet"))
        assert runner.adapters == (("verse", first),)
        assert await rig.loader.load(LoadAdapter("verse", str(tmp_path / "poet"), first)) == first
        write(tmp_path, "poet", 2)
        assert "differ from those" in str(await rig.loader.load(LoadAdapter("verse", "poet", first)))
        second = await rig.loader.load(LoadAdapter("verse", "poet"))
        assert runner.adapters == (("verse", second),) != (("verse", first),)
        assert runner._loaded_digests == {second}
        assert [await rig.loader.unload(UnloadAdapter("verse")) for _ in range(2)] == [1, 0]
        assert (runner.adapters, runner._loaded_digests, rig.num_changes) == ((), set(), 5)


async def test_a_worker_reads_below_its_folder_alone(runner: CpuModelRunner, tmp_path: Path) -> None:
    root, outside = tmp_path / "allowed", write(tmp_path, "secret", 1)
    root.mkdir()
    (root / "link").symlink_to(outside)
    async with loader_rig(runner, tmp_path, root) as rig:
        for folder in ("../secret", str(outside), "link", ".", "", "/etc"):
            answer = await rig.loader.load(LoadAdapter("poet", folder))
            assert answer == "adapters are loaded from folders below lora_dir only", folder
        assert "has no adapter_config.json" in str(await rig.loader.load(LoadAdapter("poet", "nothing")))
        assert runner.adapters == ()
    async with loader_rig(runner, tmp_path, None) as rig:
        assert "lora_dir is not set" in str(await rig.loader.load(LoadAdapter("poet", "secret")))


async def test_what_cannot_be_loaded_is_named_and_changes_nothing(
    runner: CpuModelRunner, model_folder: Path, tmp_path: Path
) -> None:
    write(tmp_path, "poet", 1)
    (write(tmp_path, "torn", 1) / "adapter_model.safetensors").write_bytes(b"\x08")
    (write(tmp_path, "odd", 1) / "adapter_config.json").write_text("{")
    async with loader_rig(runner, tmp_path, tmp_path) as rig:
        for name, folder, words in (
            ("poet", "torn", "cannot be read as safetensors"),
            ("poet", "odd", "is not valid JSON"),
            (runner.source.name, "poet", "has the model's own name"),
        ):
            assert words in str(await rig.loader.load(LoadAdapter(name, folder)))
        assert (runner.adapters, rig.num_changes) == ((), 0)
    native = make_runner(model_folder, dtype="bfloat16")
    async with loader_rig(native, tmp_path, tmp_path) as rig:
        assert "kernels compute no adapters" in str(await rig.loader.load(LoadAdapter("poet", "poet")))


def test_an_adapter_whose_rows_feel_one_another_is_refused(
    runner: CpuModelRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner.model.row_tile.rows = None
    adapter = runner.read_adapter("poet", write(tmp_path, "poet", 1))
    real = runner.model.row_products

    def uneven():
        return {
            name: (size, (lambda x, product=product: product(x) + len(x)) if adapter.digest.hex() in name else product)
            for name, (size, product) in real().items()
        }

    runner.model.row_products = uneven  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="rows would feel one another"):
        runner.install_adapter(adapter)
    assert (runner.adapters, runner._loaded_digests) == ((), set())
