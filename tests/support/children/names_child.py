"""A full-size model without memory, fed with every tensor of its index; prints what went wrong.

Alone in its process: vLLM keeps rotary tables for the next model, and these have no content.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import engine  # noqa: F401  sets the environment before vLLM is imported
from tests.support.held_bytes import model_bytes
from tests.support.published import checkpoint, index
from vllm_dllm.checkpoints import verify
from vllm_dllm.checkpoints.stored import FLOATS, Stored


class Writes(TorchDispatchMode):
    """Counts the elements that are written to each parameter, by the tensor they come from."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        named = [*model.named_parameters(), *model.named_buffers()]
        self.owner = {id_of(tensor): name for name, tensor in named}
        self.reached: set[str] = set()
        self.filled: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar):
            owner = self.owner.get(id_of(args[0]))
            if owner is not None:
                self.reached.add(owner)
                self.filled[owner] += args[0].numel()
        return func(*args, **(kwargs or {}))


def id_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def skeleton(path: Path) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.network_utils import get_open_port
    from vllm_cpu_v2 import quantized_experts

    from vllm_dllm.plugin import register

    register()
    config = EngineArgs(
        model=str(path),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            address = f"tcp://127.0.0.1:{get_open_port()}"
            init_distributed_environment(1, 0, address, 0, "gloo")
            initialize_model_parallel()
        quantized_experts.install()
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"):
            model = initialize_model(config)
        torch.set_default_dtype(torch.float32)
    return model


def report(model: torch.nn.Module, tensors: dict[str, Stored]) -> dict[str, Any]:
    writes, astray = Writes(model), {}

    def fed() -> Iterator[tuple[str, torch.Tensor]]:
        # A loader is done with a tensor when it asks for the next.
        for name, (shape, dtypes, _) in tensors.items():
            writes.reached.clear()
            dtype = torch.float32 if dtypes == FLOATS else min(dtypes, key=str)
            device = "cpu" if len(shape) == 0 or shape == (1,) else "meta"
            yield name, torch.ones(shape, dtype=dtype, device=device)
            if len(writes.reached) != 1:
                astray[name] = sorted(writes.reached)

    # These tensors have no content, so two copies of one cannot differ.
    no_content = mock.patch.object(verify, "_checksum", lambda tensor: torch.zeros(()))
    with writes, no_content:
        model.load_weights(fed())
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}
    # The shape of a packed matrix stands beside each, and has one place where they become one.
    unfilled = {
        name: [writes.filled[name], size]
        for name, size in sizes.items()
        if writes.filled[name] != size
        and not (name.endswith("weight_shape") and writes.filled[name] > size)
        # Scales of a quantized KV cache are ones unless a checkpoint brings them.
        and not re.search(r"\.attn\.[qkv]_(scale|zero_point)$", name)
    }
    held = model_bytes(model)["parameters"]
    return {"tensors": len(tensors), "astray": astray, "unfilled": unfilled, "bytes": held}


def main() -> None:
    which, *schemes = (json.loads(word) for word in sys.argv[1:])
    for scheme in schemes:
        with tempfile.TemporaryDirectory() as folder:
            path = checkpoint(Path(folder), which, scheme)
            found = report(skeleton(path), index(path, which, scheme))
        for kind in ("astray", "unfilled"):
            found[kind] = dict(list(found[kind].items())[:20])
        print(json.dumps({"model": which, "scheme": scheme, **found}))


if __name__ == "__main__":
    main()
