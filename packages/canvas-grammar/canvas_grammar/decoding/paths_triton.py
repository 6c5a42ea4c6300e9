"""The paths of a step as four Triton kernels: read logits, weigh labels, walk, choose tokens.

`read_kernel` reads the logits of some canvases while they exist and leaves a few bytes for each
chunk of `CHUNK` tokens, so that nothing later needs the logits. `weigh_kernel` makes weights of
classes and labels from these, at each position on its own. `walk_kernel` has one program for each
path, which passes messages from the last position to the first and then walks from the first to the
last; what one position writes to memory the next one reads, after a barrier. `choose_kernel` turns
the labels of the walk into tokens. Best paths and drawn ones take the same kernels.

Every path has a row of `tables.Column` in `rows`, int64 ``[paths, COLUMNS]``, which says where its
tables are in `automata` and `classes` (int32). Kernels pass intermediate results to each other in
memory with room for the largest automaton and constraint at each path and position; see `Scratch`.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from canvas_grammar.automaton import tables
from canvas_grammar.automaton.tables import COLUMNS, Column
from canvas_grammar.decoding import best_path
from canvas_grammar.decoding.noise_triton import gumbel, split_key

_COLUMNS = tl.constexpr(COLUMNS)
CHUNK = tl.constexpr(tables.CHUNK)
FLOOR = tl.constexpr(best_path.FLOOR)
LOG2_E = tl.constexpr(best_path.LOG2_E)
FIRST_RANGE_INDEX = tl.constexpr(best_path.FIRST_RANGE_INDEX)
FIRST_CHUNK_INDEX = tl.constexpr(best_path.FIRST_CHUNK_INDEX)
FIRST_MEMBER_INDEX = tl.constexpr(best_path.FIRST_MEMBER_INDEX)
FIRST_EDGE_INDEX = tl.constexpr(best_path.FIRST_EDGE_INDEX)
FIRST_CLASS_INDEX = tl.constexpr(best_path.FIRST_CLASS_INDEX)
STATES, DISTANCE = tl.constexpr(int(Column.STATES)), tl.constexpr(int(Column.DISTANCE))
FIRST_EDGE, TARGET = tl.constexpr(int(Column.FIRST_EDGE)), tl.constexpr(int(Column.TARGET))
LABEL, BY_DEGREE = tl.constexpr(int(Column.LABEL)), tl.constexpr(int(Column.BY_DEGREE))
LABELS, END_LABEL = tl.constexpr(int(Column.LABELS)), tl.constexpr(int(Column.END_LABEL))
FIRST_PART, PART = tl.constexpr(int(Column.FIRST_PART)), tl.constexpr(int(Column.PART))
FIRST_MEMBER, MEMBER = tl.constexpr(int(Column.FIRST_MEMBER)), tl.constexpr(int(Column.MEMBER))
BUNDLES = tl.constexpr(int(Column.BUNDLES))
FIRST_OF_BUNDLE = tl.constexpr(int(Column.FIRST_OF_BUNDLE))
OF_BUNDLE = tl.constexpr(int(Column.OF_BUNDLE))
CLASSES, CHUNKS = tl.constexpr(int(Column.CLASSES)), tl.constexpr(int(Column.CHUNKS))
TOKEN, REAL = tl.constexpr(int(Column.TOKEN)), tl.constexpr(int(Column.REAL))
FIRST_CHUNK = tl.constexpr(int(Column.FIRST_CHUNK))
END_CHUNK = tl.constexpr(int(Column.END_CHUNK))
CLASS_OF_TOKEN, IDS = tl.constexpr(int(Column.CLASS_OF_TOKEN)), tl.constexpr(int(Column.IDS))
END_TOKEN, CANVAS = tl.constexpr(int(Column.END_TOKEN)), tl.constexpr(int(Column.CANVAS))
DRAWS, SECOND = tl.constexpr(int(Column.DRAWS)), tl.constexpr(int(Column.SECOND))
NO = tl.constexpr(float("-inf"))
# These may be parts of a batch's tensors, and begin anywhere. Kernels read and write one number of
# them at a time, so they are compiled once for all alignments.
ANYWHERE = [
    *("state_of", "first_of", "budget_of", "width_of", "forced_of", "likeliest_of", "drawn_of"),
    *("share_of", "temperature_of", "keys_of", "states", "feasible", "second_states"),
    *("second_feasible", "token_out", "margin_out", "inside_out", "after_end_out", "second_token"),
    *("second_margin", "second_inside", "second_after_end"),
]


@triton.jit
def _value(rows, path, column: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number of a path's row; places in tables are below 2^31."""
    return tl.load(rows + path * _COLUMNS + column).to(tl.int32)


@triton.jit
def _window(first_of, budget_of, width_of, canvas):  # type: ignore[no-untyped-def]
    """The first position of a canvas' window, the position after its last, and the budget left."""
    first, budget = tl.load(first_of + canvas), tl.load(budget_of + canvas)
    end = tl.maximum(tl.minimum(first + budget, tl.load(width_of + canvas)), first)
    return first, end, budget - (end - first)


@triton.jit
def _without_nan(x):  # type: ignore[no-untyped-def]
    return tl.where(x == x, x, NO)


@triton.jit
def _log_sum(x, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """The log-sum-exp of float32 numbers, -inf where it is no number."""
    top = tl.max(x, axis)
    origin = tl.where(top == NO, 0.0, top)
    total = tl.sum(tl.exp2((x - tl.expand_dims(origin, axis)) * LOG2_E), axis)
    return _without_nan(tl.log(total) + origin)


@triton.jit
def _largest(x):  # type: ignore[no-untyped-def]
    """The largest of some numbers and its place, the first one; without NaN."""
    return tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit(do_not_specialize=["read", "by_canvas"], do_not_specialize_on_alignment=ANYWHERE)
def read_kernel(  # type: ignore[no-untyped-def]
    logits, exact, canvas_stride, row_stride, reads, read, by_canvas, rows, classes,
    first_of, budget_of, width_of, forced_of, likeliest_of, drawn_of, temperature_of, keys_of,
    length, chunks_stride, by_chunk, place_in_chunk, exact_in_chunk, chosen_logit, top_logit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce some chunks of one position; the grid is (canvases, positions, blocks of chunks).

    Of each chunk, for the canvas' best path: the largest logit (`by_chunk`) and where it is; for
    its drawn one: the log-sum-exp, the entry that is drawn from it, and this entry's exact logit.
    `reads`, int64 ``[canvases, 3]``, has for each canvas its place in the batch, and its best and
    its drawn path, or -1; the grid's first is number `read`. Positions outside the window and
    those whose token is forced are left out.

    `chosen_logit`, float32 ``[paths, L]``, is that of the token that the position has if its path
    goes through no other one's class, and `top_logit` that of the likeliest token.
    """
    number = tl.program_id(0)
    position = tl.program_id(1)
    block = tl.program_id(2)
    canvas = tl.load(reads + (read + number) * 3)
    best = tl.load(reads + (read + number) * 3 + 1)
    drawn = tl.load(reads + (read + number) * 3 + 2)
    some = tl.where(best >= 0, best, drawn)
    first, end, _left = _window(first_of, budget_of, width_of, canvas)
    at = canvas * length + position
    forced = tl.load(forced_of + at).to(tl.int32)
    row = tl.where(by_canvas != 0, canvas, number) * canvas_stride + position * row_stride
    inside = (position >= first) & (position < end)
    if block == 0:
        ids, end_token = _value(rows, some, IDS), _value(rows, some, END_TOKEN)
        top = tl.load(exact + row + tl.load(likeliest_of + at)).to(tl.float32)
        is_forced = (forced >= 0) & (position < end)
        fixed = tl.minimum(tl.where(is_forced, forced, end_token), ids - 1)
        is_fixed = is_forced | (inside == 0)
        if best >= 0:
            likeliest = tl.load(likeliest_of + at).to(tl.int32)
            token = tl.where(is_fixed, fixed, likeliest)
            logit = tl.load(exact + row + token).to(tl.float32)
            tl.store(chosen_logit + best * length + position, logit)
            tl.store(top_logit + best * length + position, top)
        if drawn >= 0:
            token = tl.where(is_fixed, fixed, tl.load(drawn_of + at).to(tl.int32))
            logit = tl.load(exact + row + token).to(tl.float32)
            tl.store(chosen_logit + drawn * length + position, logit)
            tl.store(top_logit + drawn * length + position, top)
    chunks = _value(rows, some, CHUNKS)
    if inside & (forced < 0) & (block * BLOCK < chunks):
        chunk = block * BLOCK + tl.arange(0, BLOCK)
        entry = tl.arange(0, CHUNK)
        ok = chunk < chunks
        table = classes + _value(rows, some, TOKEN)
        token = tl.load(table + chunk[:, None] * CHUNK + entry[None, :], mask=ok[:, None], other=0)
        x = _without_nan(tl.load(logits + row + token).to(tl.float32))
        if best >= 0:
            out = (best * length + position) * chunks_stride + chunk
            top, place = tl.max(x, 1, return_indices=True, return_indices_tie_break_left=True)
            tl.store(by_chunk + out, top, mask=ok)
            tl.store(place_in_chunk + out, place.to(tl.uint8), mask=ok)
        if drawn >= 0:
            out = (drawn * length + position) * chunks_stride + chunk
            if temperature_of is not None:
                warmth = tl.load(temperature_of + canvas)
                x = tl.div_rn(x, tl.where(warmth > 0, warmth, 1.0) + tl.zeros_like(x))
            real = tl.load(classes + _value(rows, some, REAL) + chunk, mask=ok, other=CHUNK)
            is_real = entry[None, :] < real[:, None]
            x = tl.where(is_real, x, NO)
            tl.store(by_chunk + out, _log_sum(x, 1), mask=ok)
            low, high = split_key(tl.load(keys_of + at))
            none = tl.max(x, 1) == NO  # then all are equally likely
            x = tl.where(none[:, None] & is_real, 0.0, x)
            x += gumbel(low, high, token + FIRST_MEMBER_INDEX)
            place = tl.argmax(x, 1)
            tl.store(place_in_chunk + out, place.to(tl.uint8), mask=ok)
            chosen = tl.load(table + chunk * CHUNK + place, mask=ok, other=0)
            tl.store(exact_in_chunk + out, tl.load(exact + row + chosen).to(tl.float32), mask=ok)


@triton.jit
def _fold(x, top, total, rate, draws):  # type: ignore[no-untyped-def]
    """Fold a tile ``[groups, terms]`` into groups' largest terms and sums of 2^(term * rate)."""
    before = top
    top = tl.maximum(top, tl.max(x, 1))
    if draws:
        origin = tl.where(top == NO, 0.0, top)
        total = total * tl.exp2((before - origin) * rate)
        total += tl.sum(tl.exp2((x - origin[:, None]) * rate), 1)
    return top, total


@triton.jit
def _folded(top, total, rate, draws):  # type: ignore[no-untyped-def]
    """The weights of groups, float64: the largest terms, or the base-2 logarithms of the sums."""
    weight = top.to(tl.float64)
    if draws:
        weight = weight * rate + tl.log2(tl.where(total > 0, total, 1.0)).to(tl.float64)
    return weight


@triton.jit
def _groups(  # type: ignore[no-untyped-def]
    tables, first_at, index_at, count, weights, joined, draws,
    GROUPS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Join float64 `weights` of adjacent indices to those of their `count` groups, `joined`."""
    for begin in range(0, count, GROUPS):
        group = begin + tl.arange(0, GROUPS)
        ok = group < count
        first = tl.load(tables + first_at + group, mask=ok, other=0)
        size = tl.load(tables + first_at + group + 1, mask=ok, other=0) - first
        top = tl.full((GROUPS,), float("-inf"), tl.float64)
        total = tl.zeros((GROUPS,), tl.float64)
        for term in range(0, tl.max(size, 0), TERMS):
            within = term + tl.arange(0, TERMS)
            is_term = within[None, :] < size[:, None]
            place = index_at + first[:, None] + within[None, :]
            index = tl.load(tables + place, mask=is_term, other=0)
            x = tl.load(weights + index, mask=is_term, other=float("-inf"))
            top, total = _fold(x, top, total, 1.0, draws)
        tl.store(joined + group, _folded(top, total, 1.0, draws), mask=ok)


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def weigh_kernel(  # type: ignore[no-untyped-def]
    rows, automata, classes, first_of, budget_of, width_of, forced_of, share_of, temperature_of,
    length, chunks_stride, by_chunk, top_logit,
    classes_stride, by_class, bundles_stride, by_bundle, labels_stride, by_label,
    GROUPS: tl.constexpr, TERMS: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    """Weigh the classes and labels of one position; the grid is (paths, positions).

    `by_class`, `by_bundle` and `by_label` are float64, to base 2 where the path is drawn.
    """
    path = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1)
    canvas = tl.load(rows + path * _COLUMNS + CANVAS)
    first, end, _left = _window(first_of, budget_of, width_of, canvas)
    if (position < first) | (position >= end):
        return
    draws = _value(rows, path, DRAWS) != 0
    at = path * length + position
    forced = tl.load(forced_of + canvas * length + position).to(tl.int32)
    near = tl.minimum(tl.maximum(forced, 0), _value(rows, path, IDS) - 1)
    own = tl.load(classes + _value(rows, path, CLASS_OF_TOKEN) + near)
    is_free = forced < 0
    rate = tl.where(draws, LOG2_E, 1.0).to(tl.float64)
    count = _value(rows, path, CLASSES)
    first_chunk = classes + _value(rows, path, FIRST_CHUNK)
    end_chunk = classes + _value(rows, path, END_CHUNK)
    kinds = by_class + at * classes_stride
    for begin in range(0, count, KINDS):
        kind = begin + tl.arange(0, KINDS)
        ok = kind < count
        chunk = tl.load(first_chunk + kind, mask=ok, other=0)
        size = tl.load(end_chunk + kind, mask=ok, other=0) - chunk
        size = tl.where(is_free, size, 0)
        top = tl.full((KINDS,), float("-inf"), tl.float32)
        total = tl.zeros((KINDS,), tl.float32)
        for term in range(0, tl.max(size, 0), CHUNK):
            within = term + tl.arange(0, CHUNK)
            is_term = within[None, :] < size[:, None]
            place = at * chunks_stride + chunk[:, None] + within[None, :]
            x = tl.load(by_chunk + place, mask=is_term, other=float("-inf"))
            top, total = _fold(x, top, total, LOG2_E, draws)
        weight = _folded(top, total, LOG2_E, draws)
        limit = rate * -FLOOR
        weight = tl.where(weight == weight, tl.minimum(tl.maximum(weight, -limit), limit), -limit)
        weight = tl.where(is_free, weight, tl.where(kind == own, 0.0, float("-inf")))
        tl.store(kinds + kind, weight, mask=ok)
    tl.debug_barrier()
    bundles = by_bundle + at * bundles_stride
    labels = by_label + at * labels_stride
    _groups(
        automata, _value(rows, path, FIRST_OF_BUNDLE), _value(rows, path, OF_BUNDLE),
        _value(rows, path, BUNDLES), kinds, bundles, draws, GROUPS, TERMS,
    )  # fmt: skip
    tl.debug_barrier()
    _groups(
        automata, _value(rows, path, FIRST_PART), _value(rows, path, PART),
        _value(rows, path, LABELS), bundles, labels, draws, GROUPS, TERMS,
    )  # fmt: skip
    tl.debug_barrier()
    if is_free:
        whole = tl.load(top_logit + at).to(tl.float64)
        if draws:
            if temperature_of is not None:
                warmth = tl.load(temperature_of + canvas).to(tl.float64)
                whole = whole / tl.where(warmth > 0, warmth, 1.0)
            whole -= tl.log(tl.load(share_of + canvas * length + position).to(tl.float64))
        whole = tl.where(whole == whole, tl.minimum(tl.maximum(whole, FLOOR), -FLOOR), FLOOR)
        last = labels + _value(rows, path, END_LABEL)
        tl.store(last, tl.maximum(tl.load(last), whole * rate))


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def walk_kernel(  # type: ignore[no-untyped-def]
    rows, automata, state_of, first_of, budget_of, width_of, keys_of, length,
    labels_stride, by_label, states_stride, messages, label_of_path, weight_of_path,
    states, feasible, second_states, second_feasible,
    GROUPS: tl.constexpr, TERMS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Find the labels and states of one path; the grid is (paths,).

    `messages` is float64 ``[paths, L + 1, S]``, `label_of_path` int32 ``[paths, L]``.
    """
    path = tl.program_id(0).to(tl.int64)
    canvas = tl.load(rows + path * _COLUMNS + CANVAS)
    draws = _value(rows, path, DRAWS) != 0
    first, end, left = _window(first_of, budget_of, width_of, canvas)
    count = _value(rows, path, STATES)
    first_edge = automata + _value(rows, path, FIRST_EDGE)
    targets, names = automata + _value(rows, path, TARGET), automata + _value(rows, path, LABEL)
    by_degree = automata + _value(rows, path, BY_DEGREE)
    distance = automata + _value(rows, path, DISTANCE)
    own = messages + path * (length + 1) * states_stride
    for begin in range(0, count, GROUPS * TERMS):
        state = begin + tl.arange(0, GROUPS * TERMS)
        near = tl.load(distance + state, mask=state < count, other=0)
        message = tl.where(near <= left, 0.0, float("-inf")).to(tl.float64)
        tl.store(own + end * states_stride + state, message, mask=state < count)
    tl.debug_barrier()
    for back in range(0, end - first):
        position = end - 1 - back
        after = own + (position + 1) * states_stride
        weights = by_label + (path * length + position) * labels_stride
        for begin in range(0, count, GROUPS):
            group = begin + tl.arange(0, GROUPS)
            ok = group < count
            state = tl.load(by_degree + group, mask=ok, other=0)
            edge = tl.load(first_edge + state, mask=ok, other=0)
            degree = tl.load(first_edge + state + 1, mask=ok, other=0) - edge
            top = tl.full((GROUPS,), float("-inf"), tl.float64)
            total = tl.zeros((GROUPS,), tl.float64)
            for term in range(0, tl.max(degree, 0), TERMS):
                within = term + tl.arange(0, TERMS)
                is_edge = within[None, :] < degree[:, None]
                at = edge[:, None] + within[None, :]
                target = tl.load(targets + at, mask=is_edge, other=0)
                name = tl.load(names + at, mask=is_edge, other=0)
                x = tl.load(after + target, mask=is_edge, other=float("-inf"))
                x += tl.load(weights + name, mask=is_edge, other=0.0)
                top, total = _fold(x, top, total, 1.0, draws)
            message = _folded(top, total, 1.0, draws)
            tl.store(own + position * states_stride + state, message, mask=ok)
        tl.debug_barrier()
    state = tl.load(state_of + canvas).to(tl.int32)
    weight = tl.load(own + first * states_stride + state)
    is_feasible = weight > float("-inf")
    tl.store(weight_of_path + path, weight)
    into, flag = states, feasible
    if second_states is not None:
        if _value(rows, path, SECOND) != 0:
            into, flag = second_states, second_feasible
    into += canvas * (length + 1)
    tl.store(flag + canvas, is_feasible)
    tl.store(into, state.to(tl.int64))
    for position in range(0, length):
        if is_feasible & (position >= first) & (position < end):
            after = own + (position + 1) * states_stride
            weights = by_label + (path * length + position) * labels_stride
            edge = tl.load(first_edge + state)
            degree = tl.load(first_edge + state + 1) - edge
            best, chosen = weight - weight + float("-inf"), edge
            for term in range(0, degree, EDGES):
                within = term + tl.arange(0, EDGES)
                is_edge = within < degree
                target = tl.load(targets + edge + within, mask=is_edge, other=0)
                name = tl.load(names + edge + within, mask=is_edge, other=0)
                x = tl.load(after + target, mask=is_edge, other=float("-inf"))
                x += tl.load(weights + name, mask=is_edge, other=0.0)
                if draws:
                    low, high = split_key(tl.load(keys_of + canvas * length + position))
                    luck = gumbel(low, high, within + FIRST_EDGE_INDEX).to(tl.float64)
                    x += luck * LOG2_E
                x = tl.where(is_edge, x, float("-inf"))
                top, place = _largest(x)
                chosen = tl.where(top > best, edge + term + place, chosen)
                best = tl.maximum(best, top)
            tl.store(label_of_path + path * length + position, tl.load(names + chosen))
            state = tl.load(targets + chosen)
        tl.store(into + position + 1, state.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def choose_kernel(  # type: ignore[no-untyped-def]
    rows, automata, classes, first_of, budget_of, width_of, forced_of, likeliest_of, drawn_of,
    keys_of, length, chunks_stride, by_chunk, place_in_chunk, exact_in_chunk, chosen_logit,
    top_logit, classes_stride, by_class, label_of_path,
    token_out, margin_out, inside_out, after_end_out, states, feasible,
    second_token, second_margin, second_inside, second_after_end, second_states, second_feasible,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one position of a `ConstrainedPath`; the grid is (paths, positions)."""
    path = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1)
    canvas = tl.load(rows + path * _COLUMNS + CANVAS)
    draws = _value(rows, path, DRAWS) != 0
    first, end, _left = _window(first_of, budget_of, width_of, canvas)
    if second_token is not None:
        if _value(rows, path, SECOND) != 0:
            token_out, margin_out, inside_out = second_token, second_margin, second_inside
            after_end_out, states, feasible = second_after_end, second_states, second_feasible
    at = path * length + position
    out = canvas * length + position
    forced = tl.load(forced_of + out).to(tl.int32)
    is_forced = (forced >= 0) & (position < end)
    token = tl.where(is_forced, forced, _value(rows, path, END_TOKEN))
    logit = tl.load(chosen_logit + at)
    inside = (position >= first) & (position < end)
    state = tl.load(states + canvas * (length + 1) + position)
    ended = tl.load(automata + _value(rows, path, DISTANCE) + state) == 0
    if inside & (forced < 0) & (tl.load(feasible + canvas) != 0):
        low, high = token.to(tl.uint32), token.to(tl.uint32)
        if draws:
            low, high = split_key(tl.load(keys_of + out))
        label = tl.load(label_of_path + at)
        first_member = automata + _value(rows, path, FIRST_MEMBER) + label
        begin = tl.load(first_member)
        count = tl.load(first_member + 1) - begin
        members = automata + _value(rows, path, MEMBER) + begin
        best_weight = tl.load(by_class + at * classes_stride) * 0.0 + float("-inf")
        kind = tl.load(members)
        for term in range(0, count, BLOCK):
            within = term + tl.arange(0, BLOCK)
            ok = within < count
            one = tl.load(members + within, mask=ok, other=0)
            weight = tl.load(by_class + at * classes_stride + one, mask=ok, other=float("-inf"))
            if draws:
                weight += gumbel(low, high, one + FIRST_CLASS_INDEX).to(tl.float64) * LOG2_E
            weight = tl.where(ok, weight, float("-inf"))
            top, place = _largest(weight)
            kind = tl.where(top > best_weight, tl.load(members + term + place), kind)
            best_weight = tl.maximum(best_weight, top)
        free = tl.load(likeliest_of + out).to(tl.int32)
        if draws:
            free = tl.load(drawn_of + out).to(tl.int32)
        if tl.load(classes + _value(rows, path, CLASS_OF_TOKEN) + free) == kind:
            token = free
        else:
            chunk = tl.load(classes + _value(rows, path, FIRST_CHUNK) + kind)
            size = tl.load(classes + _value(rows, path, END_CHUNK) + kind) - chunk
            own = at * chunks_stride + chunk
            best = logit * 0.0 + float("-inf")
            best = tl.where(best == best, best, float("-inf"))
            place_of_best = chunk * 0
            if draws:
                # First a range of chunks, then one of its chunks.
                begin = chunk * 0
                for term in range(0, size, CHUNK):
                    within = term + tl.arange(0, CHUNK)
                    x = tl.load(by_chunk + own + within, mask=within < size, other=float("-inf"))
                    number = (size * 0 + term) // CHUNK
                    score = _log_sum(x, 0) + gumbel(low, high, number + FIRST_RANGE_INDEX)
                    begin = tl.where(score > best, term, begin)
                    best = tl.maximum(best, score)
                within = begin + tl.arange(0, CHUNK)
                x = tl.load(by_chunk + own + within, mask=within < size, other=float("-inf"))
                x += gumbel(low, high, within + FIRST_CHUNK_INDEX)
                place_of_best = begin + tl.argmax(x, 0)
            else:
                for term in range(0, size, BLOCK):
                    within = term + tl.arange(0, BLOCK)
                    x = tl.load(by_chunk + own + within, mask=within < size, other=float("-inf"))
                    top, place = _largest(x)
                    place_of_best = tl.where(top > best, term + place, place_of_best)
                    best = tl.maximum(best, top)
            chunk += place_of_best
            place = tl.load(place_in_chunk + own + place_of_best).to(tl.int32)
            token = tl.load(classes + _value(rows, path, TOKEN) + chunk * CHUNK + place)
            logit = tl.load(by_chunk + own + place_of_best)
            if draws:
                logit = tl.load(exact_in_chunk + own + place_of_best)
    tl.store(token_out + out, token.to(tl.int64))
    tl.store(margin_out + out, logit - tl.load(top_logit + at))
    tl.store(inside_out + out, inside)
    tl.store(after_end_out + out, inside & ended)
