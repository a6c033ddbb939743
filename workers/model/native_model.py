"""The forward pass in C (workers/native): bfloat16, one call per step, bits free of the batch by construction."""

from __future__ import annotations

import ctypes
import threading
import weakref
from ctypes import POINTER, c_int64, pointer
from functools import partial

import torch

from workers.kv_cache import KVCache
from workers.model.batch import Batch
from workers.model.linear import Product, RowTile
from workers.model.rotary import rotary_table
from workers.model.spec import ModelSpec
from workers.model.weights import LayerWeights, ModelWeights
from workers.native.arena import Arena, huge_zeros
from workers.native.build import Isa, NativeUnavailableError, load_library
from workers.native.packing import BLOCK, PackedLinear, blocks_of, gated_order, pack, packed_bytes, plain_order
from workers.native.structs import PHASE_NAMES, BatchStruct, LayerStruct, ModelStruct, PackedStruct, StepStruct

KV_LAYOUT = "paired16"
TILE_TOKENS = 64
GROUP_TOKENS = 16
_MAX_HEAD_DIM = 256


class NativeModel:
    """Holds packed weights, buffers for the largest step seen so far, and a pool of threads of its own."""

    kv_layout = KV_LAYOUT

    def __init__(self, spec: ModelSpec, weights: ModelWeights, max_model_len: int, isa: Isa) -> None:
        refuse_unsupported(spec, weights.embedding.dtype)
        self.spec, self.isa = spec, isa
        self.kernel = f"native-{isa.name}"
        self.row_tile = RowTile()  # stays as it is: the kernels need none
        self.dtype = weights.embedding.dtype
        self._library = load_library(isa)
        self.threads = torch.get_num_threads()
        self._pool = self._library.ww_open(self.threads)
        if not self._pool:
            raise NativeUnavailableError(f"the system refuses the {isa.name} registers")
        weakref.finalize(self, self._library.ww_close, self._pool)  # ends the threads before the memory goes
        self._kept: list[object] = []  # what the structures point to
        self._model = self._make_model(weights, max_model_len)
        self._step = StepStruct(model=pointer(self._model))
        self._batch = BatchStruct()
        self._step.batch = pointer(self._batch)
        self._buffers = _Buffers(spec)
        self._first_blocks: tuple[int, ...] = ()  # of the pool that the layers point at
        self._local = threading.local()
        self._lock = threading.Lock()
        self.phase_ns = (c_int64 * len(PHASE_NAMES))()

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        if block_size % GROUP_TOKENS:
            raise ValueError(f"block_size is {block_size}, the kernels take multiples of {GROUP_TOKENS}")
        return (self.spec.num_kv_heads, 2, block_size * self.spec.head_dim)

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Logits [samples, vocab] float32, valid until the calling thread's next call."""
        count = len(batch.sample_tokens)
        logits = self._logits_for(count)
        with self._lock:  # runners in several threads may share the weights, and with them the buffers
            self._point_at(batch, cache, logits)
            if self._library.ww_step(self._pool, ctypes.byref(self._step)) != 0:
                raise NativeUnavailableError(f"{self.spec.num_layers} layers are more than a step has phases for")
        return logits[:count, : self.spec.vocab_size]

    def _point_at(self, batch: Batch, cache: KVCache, logits: torch.Tensor) -> None:
        count = len(batch.sample_tokens)
        if max(batch.num_tokens, count) > self._buffers.capacity:
            self._buffers.grow(max(batch.num_tokens, count))
            self._buffers.fill_in(self._step)
        where, model = self._batch, self._model
        where.num_tokens, where.num_samples, where.table_stride = batch.num_tokens, count, batch.block_tables.shape[1]
        where.token_ids, where.positions = batch.token_ids.ctypes.data, batch.positions.ctypes.data
        where.row_of, where.tables = batch.row_of.ctypes.data, batch.block_tables.ctypes.data
        where.slot_blocks, where.slot_offsets = batch.slot_blocks.ctypes.data, batch.slot_offsets.ctypes.data
        where.sample_tokens = batch.sample_tokens.ctypes.data
        where.logits, where.logits_stride = logits.data_ptr(), logits.shape[1]
        if batch.windowed is None:
            where.window_tables, where.window_blocks = where.tables, where.slot_blocks
        else:
            where.window_tables = batch.windowed.block_tables.ctypes.data
            where.window_blocks = batch.windowed.slot_blocks.ctypes.data
        where.kv = cache.data.data_ptr()
        if self._first_blocks is not cache.first_blocks:  # another pool than in the last step
            self._first_blocks = cache.first_blocks
            for layer, first in enumerate(cache.first_blocks):
                model.layers[layer].first_block = first
        model.block_size = cache.data.shape[-1] // self.spec.head_dim

    def _logits_for(self, num_samples: int) -> torch.Tensor:
        """The calling thread's own, grown when it must be."""
        logits: torch.Tensor | None = getattr(self._local, "logits", None)
        if logits is None or len(logits) < num_samples:
            logits = torch.empty(max(8, num_samples), blocks_of(self.spec.vocab_size) * BLOCK)
            self._local.logits = logits
        return logits

    def row_products(self) -> dict[str, tuple[int, Product]]:
        """(input size, product) per kind; layers share their shapes, so the first stands for all."""
        layer = self._model.layers[0]
        kinds = {name: getattr(layer, name) for name in ("qkv", "out", "gate_up", "down")}
        kinds["lm_head"] = self._model.lm_head
        return {name: (packed.k, partial(self._product, packed)) for name, packed in kinds.items()}

    def _product(self, packed: PackedStruct, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(blocks_of(len(x)) * BLOCK, packed.k_blocks * BLOCK + BLOCK, dtype=torch.bfloat16)
        rows[: len(x), : packed.k] = x
        out = torch.empty(len(x), packed.n_blocks * BLOCK)
        self._library.ww_product(
            ctypes.byref(packed), rows.data_ptr(), rows.shape[1], len(x), out.data_ptr(), out.shape[1]
        )
        return out[:, : packed.n]

    def measure_phases(self, enabled: bool) -> None:
        """Adds up nanoseconds per phase kind in `phase_ns`, as the calling thread sees them."""
        self._step.phase_ns = ctypes.cast(self.phase_ns, POINTER(c_int64)) if enabled else None

    def _make_model(self, weights: ModelWeights, max_model_len: int) -> ModelStruct:
        spec = self.spec
        arena = Arena(_arena_bytes(spec))
        tables = {layer.rope: rotary_table(layer.rope, spec.head_dim, max_model_len) for layer in spec.layers}
        layers = (LayerStruct * spec.num_layers)()
        for index, (layer, part) in enumerate(zip(spec.layers, weights.layers, strict=True)):
            self._fill_layer(layers[index], arena, part, tables[layer.rope])
            layers[index].window = layer.window or 0
        lm_head = pack(self._library, arena, weights.lm_head, plain_order(spec.vocab_size))
        embedding = weights.embedding.contiguous()
        self._kept += [lm_head, tables, embedding]
        return ModelStruct(
            num_layers=spec.num_layers, hidden=spec.hidden_size, intermediate=spec.intermediate_size,
            num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, vocab=spec.vocab_size,
            gelu=int(spec.activation == "gelu_tanh"), eps=spec.rms_eps, attention_scale=spec.attention_scale,
            embedding_scale=float(torch.tensor(spec.embedding_scale).to(self.dtype)), tile_tokens=TILE_TOKENS,
            embedding=embedding.data_ptr(), final_norm=self._norm(weights.final_norm),
            layers=layers, lm_head=lm_head.struct,
        )  # fmt: skip

    def _fill_layer(
        self, target: LayerStruct, arena: Arena, part: LayerWeights, table: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        spec, library = self.spec, self._library
        packed: dict[str, PackedLinear] = {
            "qkv": pack(library, arena, part.qkv, plain_order(spec.q_size + 2 * spec.kv_size), part.qkv_bias),
            "out": pack(library, arena, part.out, plain_order(spec.hidden_size), part.out_bias),
            "gate_up": pack(library, arena, part.gate_up, gated_order(spec.intermediate_size)),
            "down": pack(library, arena, part.down, plain_order(spec.hidden_size)),
        }
        for name, one in packed.items():
            setattr(target, name, one.struct)
        self._kept.append(packed)
        target.input_norm, target.mlp_norm = self._norm(part.input_norm), self._norm(part.mlp_norm)
        target.q_norm, target.k_norm = self._norm(part.q_norm), self._norm(part.k_norm)
        target.after_attention_norm = self._norm(part.after_attention_norm)
        target.after_mlp_norm = self._norm(part.after_mlp_norm)
        target.cos, target.sin = (one.data_ptr() for one in table)

    def _norm(self, weight: torch.Tensor | None) -> int | None:
        """Address of the norm's factors in float32, padded with zeros to whole blocks."""
        if weight is None:
            return None
        padded = torch.zeros(blocks_of(len(weight)) * BLOCK)
        padded[: len(weight)] = weight.float() + self.spec.norm_offset
        self._kept.append(padded)
        return padded.data_ptr()


class _Buffers:
    """What a step writes between its operations, for up to `capacity` tokens."""

    def __init__(self, spec: ModelSpec) -> None:
        self.capacity = 0
        # One block more than needed keeps rows from falling on the same cache sets.
        self._hidden = blocks_of(spec.hidden_size) * BLOCK
        self._normed = self._hidden + BLOCK
        self._qkv = max(blocks_of(spec.q_size + 2 * spec.kv_size) * BLOCK, self._hidden)
        self._query = blocks_of(spec.q_size) * BLOCK + BLOCK
        self._act = blocks_of(spec.intermediate_size) * BLOCK + BLOCK
        self._tensors: dict[str, torch.Tensor] = {}

    def grow(self, num_tokens: int) -> None:
        """Rows are whole blocks, since products read whole blocks of rows."""
        rows = (blocks_of(num_tokens) + 1) * BLOCK
        bf16, f32 = torch.bfloat16, torch.float32
        kinds = {
            "hidden": (self._hidden, f32),
            "normed": (self._normed, bf16),
            "qkv": (self._qkv, f32),
            "query": (self._query, bf16),
            "attended": (self._query, bf16),
            "act": (self._act, bf16),
            "groups": (2, torch.int32),
        }
        self._tensors = {
            name: huge_zeros(rows * width * dtype.itemsize).view(dtype).view(rows, width)
            for name, (width, dtype) in kinds.items()
        }
        self.capacity = num_tokens

    def fill_in(self, step: StepStruct) -> None:
        for name, tensor in self._tensors.items():
            setattr(step, name, tensor.data_ptr())
        step.hidden_stride, step.normed_stride, step.qkv_stride = self._hidden, self._normed, self._qkv
        step.query_stride, step.act_stride = self._query, self._act


def refuse_unsupported(spec: ModelSpec, dtype: torch.dtype, block_size: int = GROUP_TOKENS) -> None:
    """Raises NativeUnavailableError, naming what the kernels do not do."""
    if dtype != torch.bfloat16:
        raise NativeUnavailableError(f"the kernels compute in bfloat16, not {str(dtype).removeprefix('torch.')}")
    if block_size % GROUP_TOKENS:
        raise NativeUnavailableError(f"block_size is {block_size}, the kernels take multiples of {GROUP_TOKENS}")
    if spec.head_dim % 16 or spec.head_dim > _MAX_HEAD_DIM:
        raise NativeUnavailableError(f"head_dim is {spec.head_dim}, the kernels take multiples of 16 up to 256")


def _arena_bytes(spec: ModelSpec) -> int:
    per_layer = (
        packed_bytes(spec.q_size + 2 * spec.kv_size, spec.hidden_size)
        + packed_bytes(spec.hidden_size, spec.q_size)
        + packed_bytes(2 * -(-spec.intermediate_size // 16) * 16, spec.hidden_size)
        + packed_bytes(spec.hidden_size, spec.intermediate_size)
    )
    return spec.num_layers * per_layer + packed_bytes(spec.vocab_size, spec.hidden_size)
