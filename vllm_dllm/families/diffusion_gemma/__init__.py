"""DiffusionGemma: canvases of random tokens after a causal prompt, with self-conditioning."""
