"""Paths on a CPU: compiled loops over one canvas at a time, which read as little as they can.

Most of the time goes into reading logits, about one a nanosecond. So only classes are read that
some path of the canvas can go through: states that cannot be reached from the first one, given what
is forced, or from which the rest cannot be completed, are left out before anything is read. A wide
class (see `class_tables`) is read only if its weight is not known otherwise. It is known if the
token that would be chosen without a constraint is in the class: its largest logit is then that of
the whole row, and its sum is that of the whole row without all other tokens.

Here ``a`` and ``c`` are the tables of the canvas' automaton
and of its classes, ``at`` and ``ct`` their columns, and position ``i`` of ``w`` counts from the
first one of the window.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numba import njit

from canvas_grammar.automaton.tables import CHUNK, Column
from canvas_grammar.decoding import best_path

# Compiled code takes plain numbers as constants.
FLOOR, LOG2_E, LEAST_SHARE = best_path.FLOOR, best_path.LOG2_E, best_path.LEAST_SHARE
FIRST_RANGE_INDEX, FIRST_CHUNK_INDEX = best_path.FIRST_RANGE_INDEX, best_path.FIRST_CHUNK_INDEX
FIRST_MEMBER_INDEX, FIRST_EDGE_INDEX = best_path.FIRST_MEMBER_INDEX, best_path.FIRST_EDGE_INDEX
FIRST_CLASS_INDEX = best_path.FIRST_CLASS_INDEX
STATES, DISTANCE, FIRST_EDGE = int(Column.STATES), int(Column.DISTANCE), int(Column.FIRST_EDGE)
TARGET, LABEL, LABELS = int(Column.TARGET), int(Column.LABEL), int(Column.LABELS)
END_LABEL, FIRST_PART, PART = int(Column.END_LABEL), int(Column.FIRST_PART), int(Column.PART)
FIRST_MEMBER, MEMBER = int(Column.FIRST_MEMBER), int(Column.MEMBER)
BUNDLES, FIRST_OF_BUNDLE = int(Column.BUNDLES), int(Column.FIRST_OF_BUNDLE)
OF_BUNDLE, BUNDLE_OF_CLASS = int(Column.OF_BUNDLE), int(Column.BUNDLE_OF_CLASS)
CLASSES, TOKEN, REAL = int(Column.CLASSES), int(Column.TOKEN), int(Column.REAL)
FIRST_CHUNK, END_CHUNK = int(Column.FIRST_CHUNK), int(Column.END_CHUNK)
CLASS_OF_TOKEN, IDS = int(Column.CLASS_OF_TOKEN), int(Column.IDS)
WIDE, END_TOKEN = int(Column.WIDE), int(Column.END_TOKEN)

# Logits are gathered this many at a time; they stay in a CPU's first cache.
GATHERED = 1024
_32, _16, _15 = np.uint64(32), np.uint64(16), np.uint64(15)
_ONES = np.uint64(0xFFFFFFFF)
_SPREAD, _MIX_1, _MIX_2 = np.uint64(0x9E3779B1), np.uint64(0x7FEB352D), np.uint64(0x846CA68B)
# Stands for -inf, whose difference with itself would be NaN.
_LOWEST = np.float32(-1e38)
_LEAST_EXPONENT = np.float32(-126)
# The Taylor coefficients of 2^x: off by less than 2^-26 for |x| <= 1/2.
_POWERS = (np.float32(math.log(2) ** n / math.factorial(n)) for n in range(8))
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7 = _POWERS


def _compiled(function: Any, **options: Any) -> Any:
    """Compile a function when it is first called, and keep that on disk."""
    try:
        return njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # there is no folder that numba may write to
        return njit(nogil=True, **options)(function)


# Numbers without NaN in any order, which lets the compiler use vectors.
_vectorised = partial(_compiled, fastmath={"reassoc", "contract", "nsz", "nnan"})


@_compiled
def gumbel(key: Any, index: Any) -> Any:
    """Gumbel noise of one int64 key and one index, float32, as in `noise_triton`."""
    mixed = np.uint64(key)
    bits = (np.uint64(index) * _SPREAD + (mixed & _ONES)) & _ONES
    bits = _lowbias(_lowbias(bits) ^ (mixed >> _32))
    signed = np.int64(bits)
    if signed >= 1 << 31:
        value = np.float32(signed - (1 << 32)) + np.float32(2.0**32)
    else:
        value = np.float32(signed) + np.float32(0.5)
    value = min(value * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    exponential = np.float32(-math.log1p(-np.float64(value)))
    return np.float32(-math.log(np.float64(exponential)))


@_compiled
def _lowbias(x: Any) -> Any:
    x = ((x ^ (x >> _16)) * _MIX_1) & _ONES
    x = ((x ^ (x >> _15)) * _MIX_2) & _ONES
    return x ^ (x >> _16)


@_compiled
def _row(values: Any, bits: Any, at: Any, into: Any) -> Any:
    """A row of float32 `values`, or of bfloat16 `bits` (uint16) if there are no values."""
    if len(values):
        return values[at]
    own, whole = bits[at], into.view(np.uint32)
    for n in range(len(own)):
        whole[n] = np.uint32(own[n]) << np.uint32(16)
    return into


@_compiled
def _tokens_of(c: Any, ct: Any, kind: Any) -> Any:
    """The tokens of a class, ascending, int32."""
    first, end = c[ct[FIRST_CHUNK] + kind], c[ct[END_CHUNK] + kind]
    count = np.int64(0)
    if end > first:
        count = np.int64(end - first - 1) * CHUNK + c[ct[REAL] + end - 1]
    begin = ct[TOKEN] + np.int64(first) * CHUNK
    return c[begin : begin + count]


@_compiled
def _largest(row: Any, tokens: Any) -> Any:
    """The largest logit of some tokens; -inf if all are, or are NaN."""
    a = b = c = d = np.float32(-np.inf)
    most = len(tokens) // 4 * 4
    for n in range(0, most, 4):  # four at a time, because each comparison waits for the one before
        w, x = row[np.uint32(tokens[n])], row[np.uint32(tokens[n + 1])]
        y, z = row[np.uint32(tokens[n + 2])], row[np.uint32(tokens[n + 3])]
        a, b = w if w > a else a, x if x > b else b
        c, d = y if y > c else c, z if z > d else d
    for n in range(most, len(tokens)):
        w = row[np.uint32(tokens[n])]
        a = w if w > a else a
    return max(max(a, b), max(c, d))


@_vectorised
def _touch(row: Any) -> Any:
    """Read a number of each cache line of a row, in order.

    That is fast, and leaves the row in the cache: reading the tokens of classes would wait for the
    memory at almost each of them.
    """
    total = np.float32(0)
    for n in range(0, len(row), 16):
        total += row[n]
    return total


@_compiled
def _best_token(row: Any, tokens: Any) -> Any:
    """The first of some tokens that has the largest logit."""
    top = _largest(row, tokens)
    for n in tokens:
        if row[np.uint32(n)] == top:
            return n
    return tokens[0]


@_vectorised
def _largest_of(buffer: Any, count: Any) -> Any:
    """The largest of the first numbers of a buffer without NaN."""
    top = buffer[0]
    for n in range(count):
        top = buffer[n] if buffer[n] > top else top
    return top


@_vectorised
def _sum_of_powers(buffer: Any, count: Any, top: Any, rate: Any) -> Any:
    """The sum of 2^((x - top) * rate) of the first numbers of a buffer, which it overwrites."""
    bits: Any = buffer.view(np.int32)
    exponent: Any = np.empty(GATHERED, np.int32)
    for n in range(count):
        y = (buffer[n] - top) * rate
        y = y if y > _LEAST_EXPONENT else _LEAST_EXPONENT
        whole = np.floor(y + np.float32(0.5))
        y -= whole
        exponent[n] = np.int32(whole) << 23
        y = _P0 + y * (_P1 + y * (_P2 + y * (_P3 + y * (_P4 + y * (_P5 + y * (_P6 + y * _P7))))))
        buffer[n] = y
    for n in range(count):
        bits[n] += exponent[n]
    total = np.float32(0)
    for n in range(count):
        total += buffer[n]
    return total


@_compiled
def _log_sum(row: Any, tokens: Any, scale: Any, buffer: Any) -> Any:
    """The log-sum-exp of the logits of some tokens, each divided by `scale`; float64."""
    if len(tokens) == 1:
        x = np.float64(row[np.uint32(tokens[0])]) / scale
        return x if x == x else -np.inf
    origin, total = _LOWEST, 0.0
    for first in range(0, len(tokens), GATHERED):
        count = min(GATHERED, len(tokens) - first)
        some = tokens[first : first + count]
        for n in range(count):
            x = row[np.uint32(some[n])]
            buffer[n] = x if x > _LOWEST else _LOWEST
        top = _largest_of(buffer, count)
        if top > origin:
            total *= math.exp(np.float64(origin - top) / scale)
            origin = top
        if top > _LOWEST:
            rate = np.float32(LOG2_E / scale)
            total += _sum_of_powers(buffer, count, origin, rate)
    return -np.inf if origin == _LOWEST else math.log(total) + np.float64(origin) / scale


@_compiled
def _limited(weight: Any) -> Any:
    """A weight without NaN, in a range whose sums are exact enough."""
    return min(max(weight, FLOOR), -FLOOR) if weight == weight else FLOOR


@_compiled
def _mark_paths(
    a: Any, at: Any, c: Any, ct: Any, forced: Any, state: Any, left: Any, allowed: Any, alive: Any
) -> None:
    """Mark the states that a path can be in before each position, and what forced tokens allow.

    `state` is that before the window, and `left` how many tokens may follow it. `forced` is int64
    ``[w]``. `alive` (bool ``[w + 1, states]``) is all false before, and `allowed` (bool ``[w,
    labels]``) is filled where a token is forced.
    """
    width, states, labels = len(forced), at[STATES], at[LABELS]
    alive[0, state] = True
    for i in range(width):
        if forced[i] >= 0:
            kind = c[ct[CLASS_OF_TOKEN] + min(forced[i], ct[IDS] - 1)]
            bundle = a[at[BUNDLE_OF_CLASS] + kind]
            for label in range(labels):
                allowed[i, label] = False
                first = at[FIRST_PART] + label
                for part in range(a[first], a[first + 1]):
                    if a[at[PART] + part] == bundle:
                        allowed[i, label] = True
        for s in range(states):
            if alive[i, s]:
                first = at[FIRST_EDGE] + s
                for e in range(a[first], a[first + 1]):
                    if forced[i] < 0 or allowed[i, a[at[LABEL] + e]]:
                        alive[i + 1, a[at[TARGET] + e]] = True
    for s in range(states):
        alive[width, s] &= a[at[DISTANCE] + s] <= left
    for i in range(width - 1, -1, -1):
        for s in range(states):
            if alive[i, s]:
                goes_on, first = False, at[FIRST_EDGE] + s
                for e in range(a[first], a[first + 1]):
                    if alive[i + 1, a[at[TARGET] + e]] and (
                        forced[i] < 0 or allowed[i, a[at[LABEL] + e]]
                    ):
                        goes_on = True
                        break
                alive[i, s] = goes_on


@_compiled
def _weigh_classes(
    c: Any, ct: Any, row: Any, draws: Any, scale: Any, free: Any, top: Any, whole: Any,
    weight: Any, buffer: Any,
) -> None:  # fmt: skip
    """Replace NaN by the weight in what classes weigh, float64 ``[C + 1]``; no class is the last.

    `free` is the class of the token that is chosen without a constraint, `top` the largest logit,
    and `whole` what all tokens weigh together.
    """
    wide, none = ct[WIDE], ct[CLASSES]
    needs_wide = wide >= 0 and weight[wide] != weight[wide]
    by_rest = needs_wide and draws and free == wide and abs(whole) < np.inf
    if needs_wide:
        weight[wide] = whole if not draws and free == wide and abs(top) < np.inf else np.nan
    count = 0
    for kind in range(none + 1):
        if by_rest or weight[kind] != weight[kind]:
            count += c[ct[END_CHUNK] + kind] - c[ct[FIRST_CHUNK] + kind]
    if count * CHUNK > len(row) // 16:
        buffer[0] = _touch(row)
    largest = -np.inf
    for kind in range(none + 1):
        if kind != wide and (by_rest or weight[kind] != weight[kind]):
            tokens = _tokens_of(c, ct, kind)
            if draws:
                weight[kind] = _log_sum(row, tokens, scale, buffer)
            else:
                weight[kind] = np.float64(_largest(row, tokens))
            largest = max(largest, weight[kind])
    if by_rest:
        total = 0.0
        if largest > -np.inf:
            for kind in range(none + 1):
                if kind != wide:
                    total += math.exp(weight[kind] - largest)
        rest = math.log(total) + largest if total > 0 else -np.inf
        share = -math.expm1(rest - whole)
        if share >= LEAST_SHARE:
            weight[wide] = whole + math.log(share)
    if needs_wide and weight[wide] != weight[wide]:
        tokens = _tokens_of(c, ct, wide)
        if draws:
            weight[wide] = _log_sum(row, tokens, scale, buffer)
        else:
            weight[wide] = np.float64(_largest(row, tokens))


@_compiled
def _weigh_labels(
    a: Any, at: Any, c: Any, ct: Any, row: Any, draws: Any, scale: Any, free: Any, top: Any,
    whole: Any, alive: Any, classes: Any, labels: Any, buffer: Any,
) -> None:  # fmt: skip
    """Write the weights of the labels that paths need at a free position, and of their classes.

    `alive` is bool ``[2, states]``, before and after the position, `classes` float64 ``[C + 1]``
    and `labels` float64 ``[labels]``, to base 2 where drawn. The rest is as for `_weigh_classes`.
    """
    needed = np.zeros(at[LABELS], np.bool_)
    for s in range(at[STATES]):
        if alive[0, s]:
            first = at[FIRST_EDGE] + s
            for e in range(a[first], a[first + 1]):
                if alive[1, a[at[TARGET] + e]]:
                    needed[a[at[LABEL] + e]] = True
    bundles = np.full(at[BUNDLES], -np.inf)
    classes[:] = -np.inf
    for label in range(at[LABELS]):
        if needed[label]:
            first = at[FIRST_PART] + label
            for part in range(a[first], a[first + 1]):
                bundle = a[at[PART] + part]
                bundles[bundle] = np.nan
                first_of = at[FIRST_OF_BUNDLE] + bundle
                for n in range(a[first_of], a[first_of + 1]):
                    classes[a[at[OF_BUNDLE] + n]] = np.nan
    _weigh_classes(c, ct, row, draws, scale, free, top, whole, classes, buffer)
    rate = LOG2_E if draws else 1.0
    for kind in range(len(classes)):
        classes[kind] = _limited(classes[kind]) * rate
    for bundle in range(at[BUNDLES]):
        if bundles[bundle] != bundles[bundle]:
            first = at[FIRST_OF_BUNDLE] + bundle
            bundles[bundle] = _joined(
                classes, a[at[OF_BUNDLE] + a[first] : at[OF_BUNDLE] + a[first + 1]], draws
            )
    for label in range(at[LABELS]):
        if needed[label]:
            first = at[FIRST_PART] + label
            labels[label] = _joined(
                bundles, a[at[PART] + a[first] : at[PART] + a[first + 1]], draws
            )
    end = at[END_LABEL]
    labels[end] = max(labels[end], _limited(whole) * rate)


@_compiled
def _joined(weights: Any, index: Any, draws: Any) -> Any:
    """The largest of some weights, or the base-2 logarithm of the sum of powers of 2."""
    top = -np.inf
    for n in index:
        top = max(top, weights[n])
    if not draws or len(index) == 1 or top == -np.inf:
        return top
    total = 0.0
    for n in index:
        total += np.exp2(weights[n] - top)
    return top + math.log2(total)


@_compiled
def _pass_messages(
    a: Any, at: Any, draws: Any, alive: Any, label: Any, after: Any, message: Any
) -> None:
    """Write the messages of the states before a position, float64 ``[states]``.

    `alive` is bool ``[2, states]``, before and after the position, `label` float64 ``[labels]``,
    and `after` the messages after the position, float64 ``[states]``.
    """
    for s in range(at[STATES]):
        if not alive[0, s]:
            continue
        first = at[FIRST_EDGE] + s
        top = -np.inf
        for e in range(a[first], a[first + 1]):
            target = a[at[TARGET] + e]
            if alive[1, target]:
                top = max(top, after[target] + label[a[at[LABEL] + e]])
        message[s] = top
        if draws:
            total = 0.0
            for e in range(a[first], a[first + 1]):
                target = a[at[TARGET] + e]
                if alive[1, target]:
                    lower = after[target] + label[a[at[LABEL] + e]] - top
                    if lower > -64:  # what is less does not change the sum
                        total += np.exp2(lower)
            message[s] = top + math.log2(total)


@_compiled
def _edge(a: Any, at: Any, draws: Any, key: Any, s: Any, alive: Any, label: Any, after: Any) -> Any:
    """The edge by which a path leaves a state."""
    first = at[FIRST_EDGE] + s
    best, chosen = -np.inf, a[first]
    for e in range(a[first], a[first + 1]):
        target = a[at[TARGET] + e]
        if alive[target]:
            score = after[target] + label[a[at[LABEL] + e]]
            if draws and score > -np.inf:
                score += np.float64(gumbel(key, FIRST_EDGE_INDEX + e - a[first])) * LOG2_E
            if score > best:
                best, chosen = score, e
    return chosen


@_compiled
def _class(a: Any, at: Any, draws: Any, key: Any, label: Any, weight: Any) -> Any:
    """The class of a label that a path goes through."""
    first = at[FIRST_MEMBER] + label
    best, chosen = -np.inf, a[at[MEMBER] + a[first]]
    for n in range(a[first], a[first + 1]):
        kind = a[at[MEMBER] + n]
        score = weight[kind]
        if draws:
            score += np.float64(gumbel(key, FIRST_CLASS_INDEX + kind)) * LOG2_E
        if score > best:
            best, chosen = score, kind
    return chosen


@_compiled
def _drawn_token(row: Any, tokens: Any, scale: Any, key: Any, buffer: Any) -> Any:
    """A token drawn from the softmax over some tokens, see `best_path`."""
    chunks = -(-len(tokens) // CHUNK)
    sums = np.empty(chunks)
    for chunk in range(chunks):
        some = tokens[chunk * CHUNK : (chunk + 1) * CHUNK]
        sums[chunk] = _log_sum(row, some, scale, buffer)
    best, chosen = -np.inf, 0
    for n in range(-(-chunks // CHUNK)):
        top, total = -np.inf, 0.0
        for weight in sums[n * CHUNK : (n + 1) * CHUNK]:
            top = max(top, weight)
        if top > -np.inf:
            for weight in sums[n * CHUNK : (n + 1) * CHUNK]:
                total += math.exp(weight - top)
            score = math.log(total) + top + np.float64(gumbel(key, FIRST_RANGE_INDEX + n))
            if score > best:
                best, chosen = score, n
    first, end = chosen * CHUNK, min(chunks, (chosen + 1) * CHUNK)
    best, chosen = -np.inf, first
    for n in range(first, end):
        score = sums[n] + np.float64(gumbel(key, FIRST_CHUNK_INDEX + n))
        if score > best:
            best, chosen = score, n
    some = tokens[chosen * CHUNK : (chosen + 1) * CHUNK]
    none = sums[chosen] == -np.inf  # then all are equally likely
    best, token = -np.inf, some[0]
    for n in some:
        x = row[np.uint32(n)]
        if none or x == x:
            own = 0.0 if none else np.float64(x) / scale
            score = own + np.float64(gumbel(key, FIRST_MEMBER_INDEX + n))
            if score > best:
                best, token = score, n
    return token


@_compiled
def find_path(
    a: Any, at: Any, c: Any, ct: Any, values: Any, bits: Any, place: Any, draws: Any,
    temperature: Any, bounds: Any, forced: Any, likeliest: Any, free: Any, share: Any, keys: Any,
    token: Any, inside: Any, after_end: Any, states: Any, feasible: Any,
) -> Any:  # fmt: skip
    """Write the best path, or a drawn one, of one canvas, but for its margins.

    `a` and `c` are int32 ``[N]``, `at` and `ct` int64 ``[COLUMNS]``. Logits are float32 `values`
    ``[rows, ids or more]``, or if these have no rows uint16 `bits` of the same shape, those of
    bfloat16 numbers; they must be divided by `temperature`. `place`, int64 ``[L]``, is the row of
    each position. `bounds`, int64 ``[4]``, are the state
    before the window, its first position and its end, and how many tokens may follow it. `free` is
    what would be chosen without a constraint, drawn or not; `forced`, `likeliest`, `share` and
    `keys` are as in `FreeTokens`, and what is written as in `ConstrainedPath`: ``[L]``, states
    ``[L + 1]``, feasible ``[1]``. A path that is not drawn reads no `share` and no `keys`.

    Returns:
        The weight of the path, or the logarithm of the summed exponentials of the weights of all.
    """
    state, first, end, left = bounds
    width, number_of_states = end - first, at[STATES]
    allowed = np.empty((width, at[LABELS]), np.bool_)
    alive = np.zeros((width + 1, number_of_states), np.bool_)
    _mark_paths(a, at, c, ct, forced[first:end], state, left, allowed, alive)
    feasible[0] = alive[0, state]
    into: Any = np.empty(0 if len(values) else bits.shape[1], np.float32)
    buffer: Any = np.empty(GATHERED, np.float32)
    weights = np.empty((width, ct[CLASSES] + 1))
    labels = np.empty((width, at[LABELS]))
    messages = np.empty((width + 1, number_of_states))
    messages[width] = 0
    if feasible[0]:
        for i in range(width - 1, -1, -1):
            p = first + i
            if forced[p] >= 0:
                for label in range(at[LABELS]):
                    labels[i, label] = 0.0 if allowed[i, label] else -np.inf
            else:
                row = _row(values, bits, place[p], into)
                top = np.float64(row[likeliest[p]])
                whole = top / temperature - math.log(share[p]) if draws else top
                kind = c[ct[CLASS_OF_TOKEN] + free[p]]
                labels[i] = -np.inf
                _weigh_labels(
                    a, at, c, ct, row, draws, temperature, kind, top, whole, alive[i : i + 2],
                    weights[i], labels[i], buffer,
                )  # fmt: skip
            _pass_messages(a, at, draws, alive[i : i + 2], labels[i], messages[i + 1], messages[i])
    weight = messages[0, state] if feasible[0] else -np.inf
    states[0] = state
    for p in range(len(forced)):
        inside[p] = first <= p < end
        after_end[p] = inside[p] and a[at[DISTANCE] + state] == 0
        token[p] = forced[p] if p < end and forced[p] >= 0 else ct[END_TOKEN]
        if inside[p] and feasible[0]:
            i = p - first
            key = keys[p] if draws else 0
            edge = _edge(a, at, draws, key, state, alive[i + 1], labels[i], messages[i + 1])
            state = np.int64(a[at[TARGET] + edge])
            if forced[p] < 0:
                kind = _class(a, at, draws, key, a[at[LABEL] + edge], weights[i])
                if c[ct[CLASS_OF_TOKEN] + free[p]] == kind:
                    token[p] = free[p]
                else:
                    row = _row(values, bits, place[p], into)
                    tokens = _tokens_of(c, ct, kind)
                    if draws:
                        token[p] = _drawn_token(row, tokens, temperature, key, buffer)
                    else:
                        token[p] = _best_token(row, tokens)
        states[p + 1] = state
    return weight / LOG2_E if draws else weight
