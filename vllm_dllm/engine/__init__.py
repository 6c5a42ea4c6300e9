"""The glue to vLLM: slots, model state, sampler, scheduler, attention metadata, start-up checks."""
