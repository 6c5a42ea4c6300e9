"""DiffusionGemma: canvases of random tokens behind a causal prompt, with self-conditioning."""
