"""The part of a worker that runs around the model. Read `sampler` first: its docstring has the
table of steps.

One step passes through `model_state` (vLLM's runner calls it before the forward pass), `sampler`
(after it), `step`, `readout`, and `slots`. The rest is loaded when it is needed.
"""
