"""The parts of the system between which a contamination is located."""

from __future__ import annotations

from enum import Enum


class Component(Enum):
    PREFIX_CACHE = "prefix_cache"  # what is published when, and what is taken for a hit
    KEY = "key"  # what a block's name and its verification cover
    BLOCK_POOL = "block_pool"  # lifetime, ownership and bytes of blocks
    SCHEDULER = "scheduler"  # which tokens of which sequence run, preemption and resumption
    LAYOUT_MASK = "layout_mask"  # which keys a query may see, padding, packing
    POSITIONS = "positions"
    SAMPLER = "sampler"  # sampling settings, seeds, stop rules
    DETOKENIZER = "detokenizer"
    STREAM = "stream"  # who gets which output
    INDEX = "index"  # who is said to hold which prefix
    SESSION = "session"
