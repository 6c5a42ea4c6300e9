"""``vllm-dllm selftest``: does this package compute the right tokens on this machine?

`machine` finds out what the machine has, `cases` lists the ways of serving that this allows, and
`command` runs each of them in a separate process (`child`), on the tiny checkpoints next to this
file. `golden` judges the answers; `floor` and `bench` time steps; `report` writes the results.
"""
