"""What vLLM lacks on a CPU for diffusion models: kernels, collectives, experts, schemas."""
