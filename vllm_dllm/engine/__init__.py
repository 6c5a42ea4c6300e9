"""The part of a worker that runs around the model. Read `sampler` first: its docstring has the
table of steps.

One step passes through `model_state` (vLLM's runner calls it before the forward pass), `sampler`
(after it), `step`, `readout` (made at start-up), and `slots`.

The rest is loaded when it is needed: `optional_parts` names the features that only some requests
use (`constraints`, `row_options` and `token_choice`, `logprobs`, `records`); `two_block_window` is
for servers whose steps read two blocks, `interrupted` for preempted requests that stream,
`spoiled_pages` for requests that have met NaN, and `warm_up` and `kernel_choice` for the start.
"""
