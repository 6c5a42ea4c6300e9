"""Checkpoints: their tensors and fields are verified, quantized ones spelt out."""
