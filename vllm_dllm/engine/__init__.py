"""What runs beside the model in a worker. Read `sampler` first: its docstring has the table of
steps.

One step passes through `model_state` (vLLM's runner calls it before the forward pass), `sampler`
(after it), `step`, `readout` with the readout that was chosen at start-up, and `slots`.

The rest is loaded where it is needed: `optional_parts` names what only some requests ask for
(`constraints`, `row_options` and `token_choice`, `logprobs`, `records`); `block_and_canvas` is for
servers whose commits share a pass with the next canvas, `interrupted` for preempted requests that
stream, and `warm_up` for what happens before the first request.
"""
