"""Figures of the device and of random Llamas of real size on it: speed beside ceilings, and bits beside bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton

from cluster.api.sampling import SamplingParams
from workers.cuda.decode import DecodeSteps, capture_graph
from workers.cuda.kv_cache import DeviceKVCache
from workers.cuda.self_test import choose_tiles
from workers.cuda.triton_model import TritonModel
from workers.cuda.window_check import TrialSizes, compare_windows
from workers.model.batch import Batch, build_batch
from workers.model.spec import LayerSpec, ModelSpec, RopeSpec
from workers.model.weights import LayerWeights, ModelWeights
from workers.step import SampleInput, StepRow

BLOCK_SIZE, MAX_MODEL_LEN = 16, 4096
PREFILL_TOKENS, CONTEXT = 2048, 1024
DECODE_ROWS = (1, 8, 32, 64)
_WANTED = SampleInput(SamplingParams(max_tokens=1, seed=0), 0, 0, (), ())  # only whether a row samples matters here
WINDOW = 256
WINDOW_SIZES = TrialSizes(
    ((300, 180), (420, 120), (340, 160), (640, 100)) * 2, num_blocks=96, max_num_batched_tokens=256
)
# hidden, intermediate, layers, heads, KV heads, head size, vocabulary
SHAPES = {
    "1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256),
}


def describe_device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def measure_ceilings() -> dict[str, float]:
    """Bytes per second of reading and writing, and bfloat16 operations per second, on random data."""
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source))
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product_s = seconds(lambda: left @ right)
    return {"bytes_per_s": 2 * source.numel() * 2 / copy_s, "flops_per_s": 2 * 8192**3 / product_s}


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """The median of a few runs, by the device's own clock, after one that compiles."""
    work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def measure_model(name: str, ceilings: dict[str, float]) -> dict[str, Any]:
    """Bit-exact and fast mode of one shape."""
    spec = make_spec(*SHAPES[name])
    weights = random_weights(spec)
    exact = TritonModel(spec, weights, MAX_MODEL_LEN, torch.device("cuda"))
    choose_tiles(exact)
    blocks = max(DECODE_ROWS) * (CONTEXT // BLOCK_SIZE + 1)
    cache = DeviceKVCache(
        spec.num_layers, blocks, exact.kv_block_shape(BLOCK_SIZE), exact.dtype, torch.device("cuda")
    )  # fmt: skip
    failures = bit_failures(exact, cache)
    found: dict[str, Any] = {"ok": not failures, "not_bit_exact": failures, "tiles_agree": exact.mode.use_wide}
    weight_bytes = 2 * (spec.flops_per_token() // 2 + spec.vocab_size * spec.hidden_size)
    for mode in ("exact", "fast"):
        exact.mode.fast = mode == "fast"
        found[mode] = _measure_mode(exact, cache, weight_bytes, ceilings)
    del exact, cache, weights
    gc.collect()
    torch.cuda.empty_cache()
    return found


def check_windows() -> dict[str, Any]:
    """Five layers with a window and one without, as in Gemma 3, of the 1b shape."""
    spec = make_spec(*SHAPES["1b"])
    spec = replace(spec, layers=(replace(spec.layers[0], window=WINDOW),) * 5 + spec.layers[:1])
    model = TritonModel(spec, random_weights(spec), MAX_MODEL_LEN, torch.device("cuda"))
    choose_tiles(model)
    return compare_windows(model, WINDOW_SIZES, capture_graph)


def _measure_mode(
    model: TritonModel, cache: DeviceKVCache, weight_bytes: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    spec = model.spec
    prompt = torch.randint(0, spec.vocab_size, (PREFILL_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = _batch([_row(prompt, 0, list(range(PREFILL_TOKENS // BLOCK_SIZE)))])
    prefill_s = seconds(lambda: model.forward(batch, cache), repeats=3)
    attention_flops = 2 * spec.num_layers * spec.q_size * PREFILL_TOKENS**2
    flops = spec.flops_per_token() * PREFILL_TOKENS + attention_flops
    prefill = {"tokens_per_s": PREFILL_TOKENS / prefill_s}
    if "flops_per_s" in ceilings:
        prefill["share_of_flops"] = flops / prefill_s / ceilings["flops_per_s"]
    steps = DecodeSteps(model, cache, max(DECODE_ROWS), MAX_MODEL_LEN // BLOCK_SIZE, capture_graph)
    decode = {}
    for rows in DECODE_ROWS:
        step = _decode_batch(rows)
        step_s = seconds(lambda step=step: steps.run(step))  # type: ignore[misc]
        moved = weight_bytes + rows * CONTEXT * spec.kv_bytes_per_token(2)
        decode[str(rows)] = {"step_s": step_s, "tokens_per_s": rows / step_s}
        if "bytes_per_s" in ceilings:
            decode[str(rows)]["share_of_bandwidth"] = moved / step_s / ceilings["bytes_per_s"]
    return {"prefill": prefill, "decode": decode}


def bit_failures(model: TritonModel, cache: DeviceKVCache) -> list[str]:
    """A prompt whole, in chunks, among others, as the last row of a decode bucket: the last token's logits."""
    length = 300
    prompt = torch.randint(0, model.spec.vocab_size, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    straight, spread = list(range(20)), order[:20]
    expected = model.forward(_batch([_row(prompt, 0, straight)]), cache)[0].clone()
    failures = [] if bool(expected.isfinite().all()) else ["logits that are not finite"]
    for cuts in ((1,), (64,), (63, 64, 65), (17, 129, 299)):
        cache.fill(range(cache.num_blocks), float("nan"))
        for start, end in zip((0, *cuts), (*cuts, length), strict=True):
            logits = model.forward(_batch([_row(prompt[start:end], start, spread)]), cache)
        if not torch.equal(logits[0], expected):
            failures.append(f"cut at {cuts}")
    others = [_row(prompt[:count], 0, order[20 + 20 * index :]) for index, count in enumerate((1, 200, 33))]
    logits = model.forward(_batch([*others, _row(prompt[-1:], length - 1, spread)]), cache)
    if not torch.equal(logits[-1], expected):
        failures.append("a decode row among prompts")
    steps = DecodeSteps(model, cache, 8, MAX_MODEL_LEN // BLOCK_SIZE, capture_graph)
    company = [_row(prompt[:1], 0, [order[40 + index]]) for index in range(6)]
    for rows in (1, 3, 7):
        logits = steps.run(_batch([*company[: rows - 1], _row(prompt[-1:], length - 1, spread)]))
        if not torch.equal(logits[rows - 1], expected):
            failures.append(f"a captured step of {rows} rows")
    return failures


def _decode_batch(rows: int) -> Batch:
    per_row = CONTEXT // BLOCK_SIZE + 1
    return _batch([_row([5], CONTEXT, list(range(row * per_row, (row + 1) * per_row))) for row in range(rows)])


def _batch(rows: list[StepRow]) -> Batch:
    return build_batch(rows, BLOCK_SIZE, "packed", lambda count: count)


def _row(token_ids: list[int], start: int, table: list[int]) -> StepRow:
    return StepRow(seq_id=0, start=start, token_ids=token_ids, block_table=table, samples=(_WANTED,))


def make_spec(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> ModelSpec:
    return ModelSpec(
        architecture="llama", hidden_size=hidden, intermediate_size=intermediate, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, vocab_size=vocab, max_position=MAX_MODEL_LEN, rms_eps=1e-5,
        layers=(LayerSpec(RopeSpec(theta=500_000.0)),) * layers, tied_embeddings=True, attention_scale=head_dim**-0.5,
    )  # fmt: skip


def random_weights(spec: ModelSpec, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> ModelWeights:
    """Made on the device; scaled so that activations keep their size."""
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)
        return values.mul_(columns**-0.5)

    ones = torch.ones(spec.hidden_size, device=device, dtype=dtype)
    layers = [
        LayerWeights(
            input_norm=ones, qkv=matrix(spec.q_size + 2 * spec.kv_size, spec.hidden_size), qkv_bias=None, q_norm=None,
            k_norm=None, out=matrix(spec.hidden_size, spec.q_size), out_bias=None, after_attention_norm=None,
            mlp_norm=ones, gate_up=matrix(2 * spec.intermediate_size, spec.hidden_size),
            down=matrix(spec.hidden_size, spec.intermediate_size), after_mlp_norm=None,
        )
        for _ in range(spec.num_layers)
    ]  # fmt: skip
    embedding = matrix(spec.vocab_size, spec.hidden_size)
    return ModelWeights(embedding=embedding, layers=layers, final_norm=ones, lm_head=embedding)
