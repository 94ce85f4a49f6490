"""Triton kernels, and the tier that launches them on an NVIDIA GPU or, for tests, in Triton's interpreter."""
