"""The glue to vLLM: slots, model state, sampler, scheduler, attention metadata, start-up checks."""

# The attribute of vLLM's input processor that holds our `FrontEnd`, where the model is ours.
FRONT_END = "dllm_front_end"
