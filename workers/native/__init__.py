"""Kernels in C, compiled at first start for the processor at hand."""
