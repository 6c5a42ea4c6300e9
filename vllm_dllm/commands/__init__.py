"""What the command ``vllm-dllm`` does. Its parser is `vllm_dllm.cli`."""
