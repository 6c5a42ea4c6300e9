"""The paths that vLLM takes on CUDA, on the CPU engine.

vLLM's own attention backends, metadata builders, warm-up and capture of CUDA graphs run as they
are, on CPU tensors. Only what a GPU would execute is replaced (`backends`, `start_up`).
`watch` compares what each step was captured with and what it was given.
"""
