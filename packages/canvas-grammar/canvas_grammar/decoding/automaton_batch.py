"""Join the automata of all canvases of a batch: a union without edges between its parts.

Dynamic programming then takes one loop over the positions, whichever automata there are. A state's
message depends only on its own edges, so a canvas finds the same path alone and in any batch.

The union numbers states by their *depth*: a position that is p after the first one of a canvas
cannot be in a state that is deeper than p. So a position examines only the first states and the
first edges, and the host knows how many these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from canvas_grammar.automaton.windows import TokenAutomaton
from canvas_grammar.decoding.label_bundles import LabelBundles

# The distance of the state after a token that the automaton does not allow.
UNREACHABLE = 1 << 40
# Deeper states count as this deep, so that depths can be sorted as 16-bit numbers.
DEEPEST = (1 << 16) - 1


@dataclass(frozen=True)
class OwnEdges:
    """One automaton on the host, numbered for its union with others; int64 arrays.

    Attributes:
        distance: ``[states + 1]``, the fewest tokens to the end of the text. The last state is the
            dead one, which has no edges.
        depth: uint16 ``[states + 1]``, the fewest tokens that lead to a state from the states in
            which a canvas may begin.
        source, target, label: ``[edges]``, by source, then by the lowest class of the label. No two
            edges of a state have a class in common, so this order does not depend on how states
            are numbered. The last label is that of the end state's only edge, and of no other.
        members: the classes of all labels, one label after the other, each ascending.
        label_size: ``[labels]``.
        bundles: the classes that labels share.
    """

    distance: np.ndarray
    depth: np.ndarray
    source: np.ndarray
    target: np.ndarray
    label: np.ndarray
    members: np.ndarray
    label_size: np.ndarray
    bundles: LabelBundles

    @classmethod
    def from_automaton(cls, automaton: TokenAutomaton, depth: np.ndarray | None = None) -> OwnEdges:
        """Convert an automaton from its edges, labels and distances.

        Args:
            automaton: the automaton.
            depth: int ``[states]``, the tokens that lead to each state from the one in which every
                canvas begins; None if a canvas may begin in any state.
        """
        members: np.ndarray = automaton.members.astype(np.int64)
        size: np.ndarray = np.diff(automaton.label_first).astype(np.int64)
        lowest = members[automaton.label_first[:-1]]
        order = np.lexsort((lowest[automaton.edge_label], automaton.edge_source))
        source: np.ndarray = automaton.edge_source[order].astype(np.int64)
        label: np.ndarray = automaton.edge_label[order].astype(np.int64)
        label[source == automaton.states - 1] = len(size)
        members, size = np.append(members, automaton.classes - 1), np.append(size, 1)
        deep: np.ndarray = np.zeros(automaton.states + 1, dtype=np.uint16)
        if depth is not None:
            deep[:-1] = np.minimum(depth, DEEPEST)
        return cls(
            distance=np.append(automaton.distance.astype(np.int64), UNREACHABLE),
            depth=deep,
            source=source,
            target=automaton.edge_target[order].astype(np.int64),
            label=label,
            members=members,
            label_size=size,
            bundles=LabelBundles.from_labels(members, size, automaton.classes),
        )

    @property
    def dead(self) -> int:
        """The number of the dead state."""
        return len(self.distance) - 1


@dataclass(frozen=True)
class AutomatonBatch:
    """The automata of ``n`` canvases. Below, ``S`` is the number of all their states.

    Tensors are int64. States are numbered by depth, then by canvas.

    Attributes:
        first_state: ``[n]``, where a canvas begins in `number`.
        number: ``[S]``, the numbers of the states of one canvas after the other, each with its dead
            state as the last.
        own: ``[S]``, the number that a state has in its canvas.
        canvas: ``[S]``, the canvas that each state belongs to.
        distance: ``[S]``, see `OwnEdges`.
        first_edge, edge_count: ``[S]``, the edges that leave a state.
        edge: ``[edges + most_edges, 3]``, the target of each edge, S plus its label, and its
            source. The last ones are padding, and leave no state.
        edge_source, edge_target, edge_label: ``[edges]``, the same without padding.
        end_label: ``[n]``, the label between tokens after the end of the canvas' text.
        first_member, member_count: ``[labels]``, the classes of a label.
        member: ``[members + most_members]``, classes; the last ones are padding.
        bundle_class, bundle_canvas: ``[classes in bundles]``, a class, and its canvas.
        bundle_count: ``[bundles]``, how many of these each bundle has.
        class_bundle: ``[classes in bundles]``, the bundle of each.
        part: ``[parts]``, the bundles of all labels, one label after the other.
        part_count: ``[labels]``.
        part_label: ``[parts]``.
        near: for each depth, how many states are at most that deep, and how many edges leave them.
        most_edges: the largest number of edges that leave a state.
        most_members: the largest number of classes of a label.
    """

    first_state: torch.Tensor
    number: torch.Tensor
    own: torch.Tensor
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
    bundle_class: torch.Tensor
    bundle_canvas: torch.Tensor
    bundle_count: torch.Tensor
    class_bundle: torch.Tensor
    part: torch.Tensor
    part_count: torch.Tensor
    part_label: torch.Tensor
    near: tuple[tuple[int, int], ...]
    most_edges: int
    most_members: int

    @classmethod
    def union(
        cls, parts: Sequence[OwnEdges], copy: Callable[[np.ndarray], torch.Tensor]
    ) -> AutomatonBatch:
        """The union of the canvases' automata.

        Args:
            parts: the automata in the order of the canvases; canvases may share one.
            copy: from an array on the host to its copy on the device.
        """
        arrays, near = _states_and_edges(parts)
        size = np.concatenate([part.label_size for part in parts])
        most_edges, most_members = int(arrays["edge_count"].max()), int(size.max())
        states, edges = len(arrays["distance"]), arrays.pop("edges")
        padding = np.broadcast_to(np.array([0, states, -1]), (most_edges, 3))
        labelled = np.stack([edges[0], edges[1] + states, edges[2]], 1)
        arrays |= {
            "edge": np.concatenate([labelled, padding]),
            **dict(zip(("edge_target", "edge_label", "edge_source"), edges, strict=True)),
            "end_label": np.cumsum([len(part.label_size) for part in parts]) - 1,
            "first_member": firsts(size),
            "member_count": size,
            "member": np.pad(np.concatenate([part.members for part in parts]), (0, most_members)),
            **LabelBundles.joined([part.bundles for part in parts]),
        }
        # One copy to the device, and views of it.
        whole = copy(np.concatenate([array.ravel() for array in arrays.values()]))
        tensors = whole.split([array.size for array in arrays.values()])
        shaped = {
            name: tensor.view(arrays[name].shape)
            for name, tensor in zip(arrays, tensors, strict=True)
        }
        return cls(**shaped, near=near, most_edges=most_edges, most_members=most_members)

    def at(self, position: int) -> tuple[int, int]:
        """How many states and edges a position can be in; it is the same for all canvases."""
        return self.near[min(position, len(self.near) - 1)]


def firsts(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each of some adjacent parts begins, int64."""
    ends = np.asarray(sizes, dtype=np.int64).cumsum()
    return ends - np.asarray(sizes, dtype=np.int64)


def _states_and_edges(
    parts: Sequence[OwnEdges],
) -> tuple[dict[str, np.ndarray], tuple[tuple[int, int], ...]]:
    """The states and edges of a union by depth; `edges` are targets, labels and sources."""
    sizes = [len(part.distance) for part in parts]
    states, labels = firsts(sizes), firsts([len(part.label_size) for part in parts])
    depth = np.concatenate([part.depth for part in parts])
    own = np.concatenate([np.arange(size) for size in sizes])
    source = np.concatenate([p.source + at for p, at in zip(parts, states, strict=True)])
    target = np.concatenate([p.target + at for p, at in zip(parts, states, strict=True)])
    label = np.concatenate([p.label + at for p, at in zip(parts, labels, strict=True)])
    # Small numbers are sorted in a time proportional to their count.
    order, edges = np.argsort(depth, kind="stable"), np.argsort(depth[source], kind="stable")
    number: np.ndarray = np.empty_like(order)
    number[order] = np.arange(len(order))
    count = np.bincount(number[source], minlength=len(order))
    behind = np.bincount(depth).cumsum()
    return {
        "first_state": states,
        "number": number,
        "own": own[order],
        "canvas": np.arange(len(parts)).repeat(sizes)[order],
        "distance": np.concatenate([part.distance for part in parts])[order],
        "first_edge": firsts(count),
        "edge_count": count,
        "edges": np.stack([number[target], label, number[source]])[:, edges],
    }, tuple(zip(behind.tolist(), count.cumsum()[behind - 1].tolist(), strict=True))
