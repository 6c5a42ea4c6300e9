"""Nemotron-Labs-Diffusion: Ministral 3, read causally but for the canvas that is denoised."""
