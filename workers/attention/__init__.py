"""Attention over paged KV blocks: one row kernel for prefill and decode, in tiles from the sequence's start."""
