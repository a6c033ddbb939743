"""How the next token is chosen. Every value is concrete: defaults and the seed are filled in by the gateway."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling settings of one request. `temperature == 0` is greedy. Seeds are 64-bit and always set.

    Noise is a counter-based function of (seed, choice index, output position), so a request can be replayed or
    resumed on another worker with the same result.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    n: int = 1
    stop: tuple[str, ...] = ()  # applied to text, by the gateway's output processor
    stop_token_ids: tuple[int, ...] = ()  # applied by the engine; the token is not part of the text
    ignore_eos: bool = False
    logprobs: int | None = None  # None = off, k = sampled token plus the k most likely
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
