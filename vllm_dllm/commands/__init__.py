"""The subcommands of ``vllm-dllm``, whose parser is `vllm_dllm.cli`."""
