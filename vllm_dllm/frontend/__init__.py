"""A request in the process that takes it: admission, HTTP hooks, structured output."""

# The attribute of vLLM's input processor that holds our `FrontEnd`, where the model is ours.
FRONT_END = "dllm_front_end"
