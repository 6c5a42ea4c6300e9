"""Find the classes that the labels of an automaton share.

Labels are large sets of classes, and most of them differ in few: "any character of a string" and
"any character but those that end it", for example. Classes that every label has all of or none of
form a *bundle*. So the weights of classes are first joined to those of bundles, and these to those
of labels, which takes a fraction of the additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LabelBundles:
    """The bundles of one automaton; int64 arrays.

    Attributes:
        classes: the classes of all bundles, one bundle after the other, each ascending.
        bundle_size: ``[bundles]``.
        parts: the bundles of all labels, one label after the other.
        label_size: ``[labels]``.
    """

    classes: np.ndarray
    bundle_size: np.ndarray
    parts: np.ndarray
    label_size: np.ndarray

    @classmethod
    def from_labels(cls, members: np.ndarray, size: np.ndarray, classes: int) -> LabelBundles:
        """Make bundles from the classes of labels.

        Args:
            members: int64, the classes of all labels, one label after the other, each ascending.
            size: int64 ``[labels]``.
            classes: how many classes there are.
        """
        label = np.arange(len(size)).repeat(size)
        # The labels of every class, ascending. Classes are at most 16-bit numbers.
        by_class = label[np.argsort(members.astype(np.uint16), kind="stable")]
        count = np.bincount(members, minlength=classes)
        used = np.flatnonzero(count)
        bundle, first = _equal_parts(by_class, count[used])
        bundle_of: np.ndarray = np.zeros(classes, dtype=np.int64)
        bundle_of[used] = bundle
        # Each bundle is counted once in a label: with its first class.
        is_first: np.ndarray = np.zeros(classes, dtype=bool)
        is_first[used[first]] = True
        counts = is_first[members]
        return cls(
            classes=used[np.argsort(bundle, kind="stable")],
            bundle_size=np.bincount(bundle, minlength=len(first)),
            parts=bundle_of[members[counts]],
            label_size=np.bincount(label[counts], minlength=len(size)),
        )


def _equal_parts(values: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of the adjacent parts of an array are equal.

    Returns:
        The group of each part, int64 ``[parts]``, and the first part of each group.
    """
    weights = np.random.default_rng(0).integers(1, 1 << 62, size=int(values.max()) + 1)
    first = size.cumsum() - size
    keys = np.add.reduceat(weights[values], first)  # wraps around
    _, one, group = np.unique(keys, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    # Compare each part with the first one of its group, in case two sums are equal by chance.
    model = one[group]
    place = np.arange(len(values)) - first.repeat(size)
    same = bool((size == size[model]).all()) and bool(
        (values == values[first[model].repeat(size) + place]).all()
    )
    if same:
        return group, one
    return np.arange(len(size)), np.arange(len(size))
