"""The forward pass in Triton kernels: one device, every step made of row-wise operations.

Under TRITON_INTERPRET=1 it runs on the CPU as well, slowly: that is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from workers.attention import triton_paged
from workers.attention.triton_paged import AttentionInputs, AttentionShape
from workers.cuda.kernels import gated, rms_norm, rotate_and_store
from workers.cuda.lora import AdaptedRows, DeviceLinear
from workers.cuda.products import ProductMode
from workers.kv_cache import KVCache
from workers.model.batch import Batch
from workers.model.linear import Product, RowTile
from workers.model.lora import LoraAdapter
from workers.model.rotary import rotary_table
from workers.model.spec import ModelSpec
from workers.model.weights import LayerWeights, ModelWeights

KV_LAYOUT = "plain"


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A Batch on the device. Padding tokens have block −1 and position −1.

    Layers with a sliding window read `window_blocks` and `window_tables`: where they keep all, these are the others.
    """

    token_ids: torch.Tensor  # [T] int32, as all below
    positions: torch.Tensor
    row_of: torch.Tensor
    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    group_first: torch.Tensor  # [G]
    group_count: torch.Tensor
    sample_tokens: torch.Tensor  # [S]
    tables: torch.Tensor  # [R, width]
    window_blocks: torch.Tensor  # as slot_blocks, in pages
    window_tables: torch.Tensor  # as tables, in pages

    def slots(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(positions, blocks, offsets): where a layer with this window writes."""
        return self.positions, self.slot_blocks if window is None else self.window_blocks, self.slot_offsets

    def attention(self, window: int | None) -> AttentionInputs:
        """What a layer with this window reads."""
        tables = self.tables if window is None else self.window_tables
        return AttentionInputs(tables, self.group_first, self.group_count, self.row_of, self.positions)


class TritonModel:
    """Reads a Batch, writes K and V into the cache in place, returns float32 logits of the sampled tokens."""

    kv_layout = KV_LAYOUT

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        max_model_len: int,
        device: torch.device,
        mode: ProductMode | None = None,
        adapters: Sequence[LoraAdapter] = (),
    ) -> None:
        self.spec, self.device = spec, device
        self.dtype = weights.embedding.dtype
        self.row_tile = RowTile()  # stays as it is: the products need none
        self.mode = mode or ProductMode()
        self._embedding = weights.embedding.to(device)
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(device, self.dtype)
        tables = {layer.rope: rotary_table(layer.rope, spec.head_dim, max_model_len) for layer in spec.layers}
        on_device = {rope: (cos.to(device), sin.to(device)) for rope, (cos, sin) in tables.items()}
        self.layers = [
            TritonLayer(self, index, part, on_device[layer.rope])
            for index, (layer, part) in enumerate(zip(spec.layers, weights.layers, strict=True))
        ]
        self._final_norm = self.norm_factors(weights.final_norm)
        is_tied = weights.lm_head is weights.embedding
        self.lm_head = DeviceLinear(self._embedding if is_tied else weights.lm_head.to(device), None, self.mode)
        for adapter in adapters:
            self.add_adapter(adapter)

    @property
    def kernel(self) -> str:
        return f"triton-{'fast' if self.mode.fast else 'wide' if self.mode.use_wide else 'narrow'}"

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """From now on rows may ask for it by its digest. Raises torch.OutOfMemoryError and then holds nothing of it."""
        try:
            for layer, pairs in zip(self.layers, adapter.layers, strict=True):
                for name, pair in pairs.items():
                    layer.products()[name].add(adapter.digest, pair)
        except torch.OutOfMemoryError:
            self.drop_adapter(adapter.digest)
            raise

    def drop_adapter(self, digest: bytes) -> None:
        for layer in self.layers:
            for linear in layer.products().values():
                linear.drop(digest)

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        return (2, self.spec.num_kv_heads, block_size, self.spec.head_dim)

    def row_products(self) -> dict[str, tuple[int, Product]]:
        """(input size, product) per kind; layers share their shapes, so the first stands for all, but for adapters."""
        kinds = {**self.layers[0].products(), "lm_head": self.lm_head}
        found: dict[str, tuple[int, Product]] = {
            name: (linear.in_size, partial(self._product, linear)) for name, linear in kinds.items()
        }
        for weight_name, weight in self.adapter_weights().items():
            found[weight_name] = (weight.shape[1], partial(self._product, DeviceLinear(weight, None, self.mode)))
        return found

    def adapter_weights(self) -> dict[str, torch.Tensor]:
        """One thin weight of each name and shape there is."""
        found: dict[str, torch.Tensor] = {}
        for layer in self.layers:
            for name, linear in layer.products().items():
                for digest, (narrow, wide) in linear.share_products():
                    found |= {f"{name}.{digest}.a": narrow, f"{name}.{digest}.b": wide}
        return found

    def _product(self, linear: DeviceLinear, x: torch.Tensor) -> torch.Tensor:
        return linear(x.to(self.device).contiguous())

    def norm_factors(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.device).float() + self.spec.norm_offset

    def place(self, batch: Batch, block_size: int) -> StepTensors:
        """Copies a batch to the device: all integers in one piece."""
        active = batch.slot_blocks >= 0
        first, count = triton_paged.make_groups(batch.row_of, active, self.shape(block_size).tokens_per_group)
        positions = np.where(active, batch.positions, -1).astype(np.int32)
        flat = (batch.token_ids, positions, batch.row_of, batch.slot_blocks, batch.slot_offsets)
        parts = [*flat, first, count, batch.sample_tokens, batch.block_tables.reshape(-1)]
        if batch.windowed is not None:
            parts += [batch.windowed.slot_blocks, batch.windowed.block_tables.reshape(-1)]
        packed = torch.from_numpy(np.concatenate(parts))
        if self.device.type == "cuda":
            packed = packed.pin_memory()
        pieces = packed.to(self.device, non_blocking=True).split([len(part) for part in parts])
        flat_pieces, tables = pieces[:8], pieces[8].view(batch.block_tables.shape)
        window_blocks, window_tables = flat_pieces[3], tables
        if batch.windowed is not None:
            window_blocks, window_tables = pieces[9], pieces[10].view(tables.shape)
        return StepTensors(*flat_pieces, tables, window_blocks, window_tables)  # type: ignore[call-arg]

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Logits [samples, vocab] float32 on the device."""
        layers = [cache.layer(index) for index in range(len(self.layers))]
        adapted = [(one, torch.from_numpy(tokens).long().to(self.device)) for one, tokens in batch.adapted]
        return self.run(self.place(batch, layers[0].shape[-2]), layers, adapted)

    def run(self, step: StepTensors, pools: Sequence[torch.Tensor], adapted: AdaptedRows = ()) -> torch.Tensor:
        """The step on tensors alone: what a CUDA graph captures. `pools` are the blocks, or pages, of each layer."""
        residual = self._embedding[step.token_ids.long()]
        if self.spec.embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        shape = self.shape(pools[0].shape[-2])
        added = None
        for layer, layer_blocks in zip(self.layers, pools, strict=True):
            added = layer.run(residual, added, step, layer_blocks, shape, adapted)
        if len(step.sample_tokens) == 0:
            return residual.new_empty(0, self.spec.vocab_size, dtype=torch.float32)
        assert added is not None
        wanted = step.sample_tokens.long()
        normed = rms_norm(added[wanted], self._final_norm, self.spec.rms_eps, residual[wanted])
        return self.lm_head(normed).float()

    def shape(self, block_size: int) -> AttentionShape:
        spec = self.spec
        return AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, spec.attention_scale)


class TritonLayer:
    """One layer. The residual stream is kept in place; what is yet to be added to it is handed on."""

    def __init__(
        self,
        model: TritonModel,
        index: int,
        weights: LayerWeights,
        table: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._spec, self._window, self._table = model.spec, model.spec.layers[index].window, table

        def factors(weight: torch.Tensor | None) -> torch.Tensor | None:
            return None if weight is None else model.norm_factors(weight)

        def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DeviceLinear:
            on_device = None if bias is None else bias.to(model.device)
            return DeviceLinear(weight.to(model.device), on_device, model.mode)

        self._input_norm, self._mlp_norm = model.norm_factors(weights.input_norm), model.norm_factors(weights.mlp_norm)
        q_norm, k_norm = factors(weights.q_norm), factors(weights.k_norm)
        self._qk_norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        self._after_attention = factors(weights.after_attention_norm)
        self._after_mlp = factors(weights.after_mlp_norm)
        self.qkv = linear(weights.qkv, weights.qkv_bias)
        self.out = linear(weights.out, weights.out_bias)
        self.gate_up = linear(weights.gate_up)
        self.down = linear(weights.down)

    def products(self) -> dict[str, DeviceLinear]:
        return {"qkv": self.qkv, "out": self.out, "gate_up": self.gate_up, "down": self.down}

    def run(
        self,
        residual: torch.Tensor,
        added: torch.Tensor | None,
        step: StepTensors,
        blocks: torch.Tensor,
        shape: AttentionShape,
        adapted: AdaptedRows,
    ) -> torch.Tensor:
        """Adds `added` and this layer's attention to `residual` in place; returns the MLP's output, yet to be added."""
        eps = self._spec.rms_eps
        normed = rms_norm(residual, self._input_norm, eps) if added is None else self._add(added, residual)
        qkv = self.qkv(normed, adapted)
        query = rotate_and_store(
            qkv, blocks, step.slots(self._window), self._table, self._qk_norms, shape.num_heads, eps
        )
        attended = triton_paged.paged_attention(query, blocks, step.attention(self._window), shape, self._window)
        output = self.out(attended, adapted)
        if self._after_attention is not None:
            output = rms_norm(output, self._after_attention, eps)
        normed = rms_norm(output, self._mlp_norm, eps, residual)
        middle = gated(self.gate_up(normed, adapted), is_gelu=self._spec.activation == "gelu_tanh")
        output = self.down(middle, adapted)
        return output if self._after_mlp is None else rms_norm(output, self._after_mlp, eps)

    def _add(self, added: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return rms_norm(added, self._input_norm, self._spec.rms_eps, residual)
