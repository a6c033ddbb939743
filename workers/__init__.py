"""How tokens are made: a continuous-batching engine over a paged KV cache.

Imports neither Ray nor Redis outside `actor.py`, so that the engine runs on a bare machine.
"""
