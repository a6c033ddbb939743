"""The runner for NVIDIA GPUs: Triton kernels, device-resident weights, KV blocks and sampling.

Nothing in here is imported by the CPU path, and importing it needs neither a GPU nor triton.
"""
