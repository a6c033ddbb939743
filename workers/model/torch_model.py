"""The forward pass in torch operations: every architecture and dtype, no compiler needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from workers.attention.torch_paged import TILE_TOKENS, kv_block_shape, paged_attention, write_kv
from workers.kv_cache import KVCache
from workers.model.batch import Batch
from workers.model.linear import Linear, Product, RowTile
from workers.model.lora import LoraAdapter
from workers.model.lora_linear import AdaptedRows, LoraLinear
from workers.model.rotary import rotary_table
from workers.model.spec import ModelSpec
from workers.model.weights import LayerWeights, ModelWeights

KV_LAYOUT = "plain"


class TorchModel:
    """Reads a Batch, writes K and V into the cache in place, returns float32 logits of the sampled tokens."""

    kernel = "torch"
    kv_layout = KV_LAYOUT

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, max_model_len: int, adapters: Sequence[LoraAdapter] = ()
    ) -> None:
        self.spec = spec
        self.dtype = weights.embedding.dtype
        self.row_tile = RowTile()
        self._embedding = weights.embedding
        # Gemma's scale is rounded to the model's dtype before it multiplies.
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(self.dtype)
        tables = {layer.rope: rotary_table(layer.rope, spec.head_dim, max_model_len) for layer in spec.layers}
        self.layers = [
            TorchLayer(spec, index, part, tables[layer.rope], self.row_tile)
            for index, (layer, part) in enumerate(zip(spec.layers, weights.layers, strict=True))
        ]
        self._final_norm = Norm(weights.final_norm, spec)
        self.lm_head = Linear(weights.lm_head, None, self.row_tile)
        for adapter in adapters:
            self.add_adapter(adapter)

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """From now on rows may ask for it by its digest."""
        for layer, pairs in zip(self.layers, adapter.layers, strict=True):
            for name, pair in pairs.items():
                layer.products()[name].add(adapter.digest, pair)

    def drop_adapter(self, digest: bytes) -> None:
        for layer in self.layers:
            for linear in layer.products().values():
                linear.drop(digest)

    def row_products(self) -> dict[str, tuple[int, Product]]:
        """(input size, product) per kind; layers share their shapes, so the first stands for all."""
        products = {name: (linear.in_size, linear.product) for name, linear in self.layers[0].products().items()}
        for layer in self.layers:  # but an adapter may leave the first one alone
            for name, linear in layer.products().items():
                products |= {f"{name}.{part}": (size, thin) for part, size, thin in linear.share_products()}
        return {**products, "lm_head": (self.lm_head.in_size, self.lm_head.product)}

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        return kv_block_shape(self.spec.num_kv_heads, block_size, self.spec.head_dim)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Logits [samples, vocab] float32."""
        hidden = self._embedding[torch.from_numpy(batch.token_ids).long()]
        if self.spec.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        adapted = [(digest, torch.from_numpy(tokens).long()) for digest, tokens in batch.adapted]
        for index, layer in enumerate(self.layers):
            seen = batch if batch.windowed is None or layer.window is None else batch.windowed
            hidden = layer.forward(hidden, seen, cache.layer(index), adapted)
        return self._logits(hidden, batch.sample_tokens)

    def _logits(self, hidden: torch.Tensor, sample_tokens: np.ndarray) -> torch.Tensor:
        count = len(sample_tokens)
        if count == 0:
            return torch.empty(0, self.spec.vocab_size)
        wanted = np.zeros(self.row_tile.pad(count), dtype=np.int64)
        wanted[:count] = sample_tokens
        rows = self._final_norm(hidden[torch.from_numpy(wanted)])
        return self.lm_head(rows)[:count].float()


class Norm:
    """Root-mean-square norm, computed in float32 by torch's own kernel, whose rows do not depend on the batch."""

    def __init__(self, weight: torch.Tensor, spec: ModelSpec) -> None:
        self._weight = weight.float() + spec.norm_offset
        self._eps = spec.rms_eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self._weight.shape, self._weight, self._eps).to(x.dtype)


def _norm(weight: torch.Tensor | None, spec: ModelSpec) -> Norm | None:
    return None if weight is None else Norm(weight, spec)


class TorchLayer:
    """One layer."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        weights: LayerWeights,
        table: tuple[torch.Tensor, torch.Tensor],
        tile: RowTile,
    ) -> None:
        self._spec, self.window = spec, spec.layers[index].window
        self._cos, self._sin = table
        self.tile_tokens = TILE_TOKENS  # fixed: another value gives other bits
        self._input_norm = Norm(weights.input_norm, spec)
        self._mlp_norm = Norm(weights.mlp_norm, spec)
        self._q_norm = _norm(weights.q_norm, spec)
        self._k_norm = _norm(weights.k_norm, spec)
        self._after_attention = (
            None if weights.after_attention_norm is None else Norm(weights.after_attention_norm, spec)
        )
        self._after_mlp = _norm(weights.after_mlp_norm, spec)

        def adaptable(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LoraLinear:
            return LoraLinear(Linear(weight, bias, tile), tile)

        self.qkv = adaptable(weights.qkv, weights.qkv_bias)
        self.out = adaptable(weights.out, weights.out_bias)
        self.gate_up = adaptable(weights.gate_up)
        self.down = adaptable(weights.down)

    def forward(
        self, hidden: torch.Tensor, batch: Batch, blocks: torch.Tensor, adapted: AdaptedRows = ()
    ) -> torch.Tensor:
        attended = self._attend(self._input_norm(hidden), batch, blocks, adapted)
        if self._after_attention is not None:
            attended = self._after_attention(attended)
        hidden = hidden + attended
        output = self._mlp(self._mlp_norm(hidden), adapted)
        if self._after_mlp is not None:
            output = self._after_mlp(output)
        return hidden + output

    def products(self) -> dict[str, LoraLinear]:
        return {"qkv": self.qkv, "out": self.out, "gate_up": self.gate_up, "down": self.down}

    def _attend(self, x: torch.Tensor, batch: Batch, blocks: torch.Tensor, adapted: AdaptedRows) -> torch.Tensor:
        spec = self._spec
        parts = self.qkv(x, adapted).split([spec.q_size, spec.kv_size, spec.kv_size], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, spec.head_dim)) for part in parts)
        if self._q_norm is not None and self._k_norm is not None:
            query, key = self._q_norm(query), self._k_norm(key)
        positions = torch.from_numpy(batch.positions).long()
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        write_kv(blocks, key, value, batch)
        attended = paged_attention(query, blocks, batch, spec.attention_scale, self.window, self.tile_tokens)
        return self.out(attended.flatten(1), adapted)

    def _mlp(self, x: torch.Tensor, adapted: AdaptedRows) -> torch.Tensor:
        gate, up = self.gate_up(x, adapted).chunk(2, dim=-1)
        if self._spec.activation == "silu":
            return self.down(F.silu(gate) * up, adapted)
        return self.down(F.gelu(gate, approximate="tanh") * up, adapted)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim]: pairs (i, i + head_dim / 2) turn by the position's angle; in float32, rounded once."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
