"""The automata of all canvases of a batch as one: a union without edges between its parts.

Dynamic programming then takes one loop over the positions, whichever automata there are. A state's
message depends on its own edges only, so a canvas finds the same path alone and in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton

# The distance of the state that is behind a token that the automaton does not allow.
UNREACHABLE = 1 << 40


@dataclass(frozen=True)
class OwnEdges:
    """One automaton on the host, numbered for its union with others; int64 arrays.

    Attributes:
        distance: ``[states + 1]``, the fewest tokens to the end of the text. The last state is the
            dead one, which has no edges.
        source, target, label: ``[edges]``, by source, then by the lowest class of the label. No two
            edges of a state have a class in common, so this order does not depend on how states
            are numbered. The last label is that of the end state's only edge, and of no other.
        members: the classes of all labels, one label after the other, each ascending.
        label_size: ``[labels]``.
    """

    distance: np.ndarray
    source: np.ndarray
    target: np.ndarray
    label: np.ndarray
    members: np.ndarray
    label_size: np.ndarray

    @classmethod
    def of(cls, automaton: TokenAutomaton) -> OwnEdges:
        """From its edges, labels and distances."""
        members: np.ndarray = automaton.members.astype(np.int64)
        lowest = members[automaton.label_first[:-1]]
        order = np.lexsort((lowest[automaton.edge_label], automaton.edge_source))
        source = automaton.edge_source[order].astype(np.int64)
        label = automaton.edge_label[order].astype(np.int64)
        label[source == automaton.states - 1] = automaton.label_first.size - 1
        return cls(
            distance=np.append(automaton.distance.astype(np.int64), UNREACHABLE),
            source=source,
            target=automaton.edge_target[order].astype(np.int64),
            label=label,
            members=np.append(members, automaton.classes - 1),
            label_size=np.append(np.diff(automaton.label_first).astype(np.int64), 1),
        )

    @property
    def dead(self) -> int:
        """The number of the dead state."""
        return len(self.distance) - 1


@dataclass(frozen=True)
class AutomatonBatch:
    """The automata of ``n`` canvases. Below, ``S`` is the number of all their states.

    Tensors are int64. The states of a canvas are adjacent, its dead state included.

    Attributes:
        first_state: ``[n]``.
        canvas: ``[S]``, whose state it is.
        distance: ``[S]``, see `OwnEdges`.
        first_edge, edge_count: ``[S]``, the edges that leave a state.
        edge: ``[edges + most_edges, 3]``, the target of each edge, S plus its label, and its
            source. The last ones are padding, and leave no state.
        edge_source, edge_target, edge_label: ``[edges]``, the same without padding.
        end_label: ``[n]``, the label between tokens behind the end of the canvas' text.
        first_member, member_count: ``[labels]``, the classes of a label.
        member: ``[members + most_members]``, classes; the last ones are padding.
        member_label: ``[members]``.
        member_canvas: ``[members]``, whose label it is.
        most_edges: the largest number of edges that leave a state.
        most_members: the largest number of classes of a label.
    """

    first_state: torch.Tensor
    canvas: torch.Tensor
    distance: torch.Tensor
    first_edge: torch.Tensor
    edge_count: torch.Tensor
    edge: torch.Tensor
    edge_source: torch.Tensor
    edge_target: torch.Tensor
    edge_label: torch.Tensor
    end_label: torch.Tensor
    first_member: torch.Tensor
    member_count: torch.Tensor
    member: torch.Tensor
    member_label: torch.Tensor
    member_canvas: torch.Tensor
    most_edges: int
    most_members: int

    @classmethod
    def of(
        cls, parts: Sequence[OwnEdges], copy: Callable[[np.ndarray], torch.Tensor]
    ) -> AutomatonBatch:
        """The union of the canvases' automata.

        Args:
            parts: the automata in the order of the canvases; canvases may share one.
            copy: from an array on the host to its copy on the device.
        """
        states = _firsts([len(part.distance) for part in parts])
        labels = _firsts([len(part.label_size) for part in parts])
        canvas = np.arange(len(parts))
        source = np.concatenate([p.source + at for p, at in zip(parts, states, strict=True)])
        target = np.concatenate([p.target + at for p, at in zip(parts, states, strict=True)])
        label = np.concatenate([p.label + at for p, at in zip(parts, labels, strict=True)])
        members = np.concatenate([part.members for part in parts])
        size = np.concatenate([part.label_size for part in parts])
        distance = np.concatenate([part.distance for part in parts])
        edge_count = np.bincount(source, minlength=len(distance))
        most_edges, most_members = int(edge_count.max()), int(size.max())
        edge = np.stack([target, label + len(distance), source], 1)
        padding = np.broadcast_to(np.array([0, len(distance), -1]), (most_edges, 3))
        arrays = {
            "first_state": states,
            "canvas": canvas.repeat([len(part.distance) for part in parts]),
            "distance": distance,
            "first_edge": _firsts(edge_count),
            "edge_count": edge_count,
            "edge": np.concatenate([edge, padding]),
            "edge_source": source,
            "edge_target": target,
            "edge_label": label,
            "end_label": np.cumsum([len(part.label_size) for part in parts]) - 1,
            "first_member": _firsts(size),
            "member_count": size,
            "member": np.pad(members, (0, most_members)),
            "member_label": np.arange(len(size)).repeat(size),
            "member_canvas": canvas.repeat([len(part.members) for part in parts]),
        }
        # One copy to the device, and views of it.
        whole = copy(np.concatenate([array.ravel() for array in arrays.values()]))
        tensors = whole.split([array.size for array in arrays.values()])
        shaped = {
            name: tensor.view(arrays[name].shape)
            for name, tensor in zip(arrays, tensors, strict=True)
        }
        return cls(**shaped, most_edges=most_edges, most_members=most_members)


def _firsts(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each of some adjacent parts begins, int64."""
    ends = np.asarray(sizes, dtype=np.int64).cumsum()
    return ends - np.asarray(sizes, dtype=np.int64)
