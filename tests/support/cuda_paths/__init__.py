"""The paths that vLLM takes on CUDA, on the CPU engine.

vLLM's own attention backends, metadata builders, warm-up and capture of CUDA graphs run as they
are, on CPU tensors. Only what a GPU would execute is replaced:

- `reference` computes what an attention kernel would, and checks what it was told;
- `backends` puts it in the place of each backend's kernels;
- `graphs` has a CUDA graph that is the function that vLLM captured, with its arguments;
- `start_up` gives a CPU worker the start-up of a GPU worker.

`watch` compares what each step was captured with, what it was given, and what its phases say
(`expected`), and keeps a list of problems. `cases` runs one engine so.
"""
