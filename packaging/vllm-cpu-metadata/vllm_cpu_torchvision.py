"""Let the package index's torchvision be imported beside a CPU build of torch.

Its compiled operators are built for CUDA and do not load, so ``import torchvision`` fails
with "operator torchvision::nms does not exist" and takes ``import vllm`` down with it,
before any plugin is loaded. Declaring the two schemas that torchvision registers
implementations for is enough. A ``.pth`` file written by ``make setup`` imports this
module at start-up; it costs nothing until torchvision is imported, and nothing happens
where the operators exist.
"""

import importlib.abc
import sys

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class _DeclareOnImport(importlib.abc.MetaPathFinder):
    """Finds nothing; only notices that torchvision is about to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare()
        return None


def declare():
    """Declare the operator schemas, unless torchvision's own library loads."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    # A collected library takes its schemas with it.
    declare.library = library


sys.meta_path.insert(0, _DeclareOnImport())
