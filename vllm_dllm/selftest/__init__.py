"""``vllm-dllm selftest``: does this package compute the right tokens on this machine?

`cases` lists the ways of serving that the machine has; `command` runs each in a separate process
(`child`), on the tiny checkpoints next to this file, and reports what `golden` says of it.
"""
