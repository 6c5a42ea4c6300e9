"""Checkpoints: verification of tensors and config fields, and quantization schemes."""
