"""When does a choice end? Text-level stop strings are the gateway's business; here only tokens and lengths count."""

from __future__ import annotations

from cluster.api.output import FinishReason
from workers.sequence import Sequence


class StopCheck:
    def __init__(self, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len

    def reason(self, seq: Sequence) -> FinishReason | None:
        """Why `seq` ends with its last output token, or None. A stop token counts only from min_tokens on."""
        sampling = seq.request.sampling
        num_output = len(seq.output_token_ids)
        if num_output and num_output >= sampling.min_tokens:
            token_id = seq.output_token_ids[-1]
            is_eos = token_id in self._eos_token_ids and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                return FinishReason.STOP
        if num_output >= sampling.max_tokens or seq.num_tokens >= self._max_model_len:
            return FinishReason.LENGTH
        return None
