"""The part of a worker that runs around the model. Read `sampler` first: its docstring has the
table of steps.

One step passes through `model_state` (vLLM's runner calls it before the forward pass), `sampler`
(after it), `step` with `algorithms`, `readout` (made at start-up), and `slots`.

The rest is loaded when it is needed: `optional_parts` names the features that only some requests
use (`constraints`, `row_options` and `token_choice`, `logprobs`, `records`); `block_and_canvas` is
for servers whose commits share a pass with the next canvas, `interrupted` for preempted requests
that stream, and `warm_up` for the preparations before the first request.
"""
