"""What stock vLLM lacks on a CPU for diffusion models: kernels, a runner choice, two schemas."""
