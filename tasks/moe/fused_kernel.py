"""One persistent Triton kernel for a layer of experts: gate, dispatch, both GEMMs, combination.

Symbols are those of experts.py. The grid has as many programs as run at the same time, and each
takes every so many-th piece of work of a stage:

    stage     piece of work                  writes
    gate      a block of tokens              logits; each token's k experts and g; their numbers
    dispatch  one choice of such a block     the row of each assignment, in the order of `route`
    inner     a tile of rows and columns     GELU(x W₁ + b₁) of the rows of one expert
    outer     a tile of rows and columns     h W₂ + b₂
    combine   a block of tokens and columns  Σ g of a token's rows, first choices first

Where a stage needs all that another has made, the programs wait at a barrier, which is a counter in
memory. Between `inner` and `outer` there is none: a counter for each tile of rows says how many of
its columns are there, so that a tile of `outer` begins as soon as its own rows are done. Nothing
can wait forever: every program makes all its tiles of `inner` before it waits for another's, and
the launch is cooperative, so that either all programs run at the same time or none does.

Sums have one order, whatever program makes them: results are the same at every call.

Source of the idea, a whole layer as one kernel with a scheduler of tiles inside: Aimuyo et al.,
"FlashMoE" (arXiv 2506.04667). There tokens also travel between GPUs inside the kernel; here they do
not leave theirs.
"""

# A kernel's parameters are no Python objects, but pointers, numbers and constants of its compiler.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

GATE, DISPATCH, INNER, OUTER, COMBINE, END = (tl.constexpr(number) for number in range(6))
"""Stages, in their order."""


@triton.jit
def _barrier(arrived, turn):
    """Wait until all programs have come here, for the turn-th time."""
    # A program's threads store; one of them then speaks for all, so they have to meet before.
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(arrived, 0, sem="acquire", scope="gpu") < turn * tl.num_programs(0):
        pass
    tl.debug_barrier()


@triton.jit
def _gate(
    x, gate, cast, logits, expert, weight, numbers, num_tokens, width, num_experts,
    ACTIVE: tl.constexpr, CAST: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(num_tokens, TOKENS)
    experts = tl.arange(0, EXPERTS)
    real = experts < num_experts
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        tokens = block * TOKENS + tl.arange(0, TOKENS)
        there = tokens < num_tokens
        sums = tl.zeros((TOKENS, EXPERTS), tl.float32)
        for first in range(0, width, DEPTH):
            within = first + tl.arange(0, DEPTH)
            inside = there[:, None] & (within < width)[None, :]
            places = tokens[:, None].to(tl.int64) * width + within[None, :]
            part = tl.load(x + places, mask=inside, other=0.0)
            if CAST:
                tl.store(cast + places, part.to(cast.dtype.element_ty), mask=inside)
            columns = gate + experts[None, :] * width + within[:, None]
            inside = (within < width)[:, None] & real[None, :]
            matrix = tl.load(columns, mask=inside, other=0.0)
            # Small differences decide, so never in TF32.
            sums = tl.dot(part.to(tl.float32), matrix.to(tl.float32), sums, input_precision="ieee")
        inside = there[:, None] & real[None, :]
        tl.store(logits + tokens[:, None] * num_experts + experts[None, :], sums, mask=inside)
        sums = tl.where(real[None, :], sums, float("-inf"))
        shares = tl.exp(sums - tl.max(sums, 1)[:, None])
        shares = shares / tl.sum(shares, 1)[:, None]
        # Logits that are not finite must not lead to an expert that there is not: its rows would
        # be written behind the last one.
        left = tl.where(shares == shares, shares, 0.0)
        left = tl.where(real[None, :], left, -2.0)
        ranked = left
        for _ in tl.static_range(ACTIVE):
            best = tl.argmax(ranked, 1)
            ranked = tl.where(experts[None, :] == best[:, None], -1.0, ranked)
        chosen = tl.sum(tl.where(ranked == -1.0, shares, 0.0), 1)
        for choice in tl.static_range(ACTIVE):
            best = tl.argmax(left, 1)
            mine = experts[None, :] == best[:, None]
            left = tl.where(mine, -1.0, left)
            share = tl.sum(tl.where(mine, shares, 0.0), 1)
            if ACTIVE > 1:
                share = share / chosen
            tl.store(expert + choice * num_tokens + tokens, best, mask=there)
            tl.store(weight + choice * num_tokens + tokens, share, mask=there)
            number = tl.sum((mine & there[:, None]).to(tl.int32), 0)
            unit = choice * blocks + block
            tl.store(numbers + unit * num_experts + experts, number, mask=real)


@triton.jit
def _dispatch(
    expert, numbers, choices, row, counts, wanted, num_tokens, num_experts, most,
    ACTIVE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(num_tokens, TOKENS)
    units = ACTIVE * blocks  # first choices of all blocks come before second ones
    experts = tl.arange(0, EXPERTS)
    real = experts < num_experts
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        total = tl.zeros((EXPERTS,), tl.int32)
        before = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, units, 16):
            others = first + tl.arange(0, 16)
            places = others[:, None] * num_experts + experts[None, :]
            inside = (others < units)[:, None] & real[None, :]
            number = tl.load(numbers + places, mask=inside, other=0)
            total += tl.sum(number, 0)
            before += tl.sum(tl.where((others < unit)[:, None], number, 0), 0)
        kept = tl.minimum(total, most)
        if unit == 0:
            tl.store(wanted + experts, total, mask=real)
            tl.store(counts + experts, kept, mask=real)
        begin = tl.cumsum(kept, 0) - kept
        tokens = (unit % blocks) * TOKENS + tl.arange(0, TOKENS)
        there = tokens < num_tokens
        assignment = (unit // blocks) * num_tokens + tokens
        own = tl.load(expert + assignment, mask=there, other=-1)
        mine = own[:, None] == experts[None, :]
        place = before[None, :] + tl.cumsum(mine.to(tl.int32), 0) - 1
        place = tl.sum(tl.where(mine, place, 0), 1)
        at = place + tl.sum(tl.where(mine, begin[None, :], 0), 1)
        room = place < most
        tl.store(row + assignment, tl.where(room, at, -1), mask=there)
        tl.store(choices + at, assignment, mask=there & room)


@triton.jit
def _tiles(counts, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Rows of each expert, and its tiles of rows."""
    experts = tl.arange(0, EXPERTS)
    number = tl.load(counts + experts, mask=experts < num_experts, other=0).to(tl.int32)
    return number, tl.cdiv(number, ROWS)


@triton.jit
def _rows(tile, number, tiles, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile of rows, the rows, and which of them there are."""
    experts = tl.arange(0, EXPERTS)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    earlier = experts < expert
    own = (tile - tl.sum(tl.where(earlier, tiles, 0), 0)) * ROWS + tl.arange(0, ROWS)
    inside = own < tl.sum(tl.where(experts == expert, number, 0), 0)
    return expert, tl.sum(tl.where(earlier, number, 0), 0) + own, inside


@triton.jit
def _product(
    left, rows, inside, right, columns, depth, width, bias,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Chosen rows of `left` [·, depth] times columns of `right` [depth, width], and the bias."""
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, depth, DEPTH):
        within = first + tl.arange(0, DEPTH)
        places = rows[:, None].to(tl.int64) * depth + within[None, :]
        there = inside[:, None] & (within < depth)[None, :]
        one = tl.load(left + places, mask=there, other=0.0)
        there = (within < depth)[:, None] & (columns < width)[None, :]
        other = tl.load(right + within[:, None] * width + columns[None, :], mask=there, other=0.0)
        if WIDEN:
            one, other = one.to(tl.float32), other.to(tl.float32)
        sums = tl.dot(one, other, sums, input_precision=PRECISION)
    added = tl.load(bias + columns, mask=columns < width, other=0.0)
    return sums + added.to(tl.float32)[None, :]


@triton.jit
def _inner(
    x, choices, counts, inner, inner_bias, before, hidden, ready,
    num_tokens, num_experts, width, num_hidden,
    KEEP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    number, tiles = _tiles(counts, num_experts, EXPERTS, ROWS)
    across = tl.cdiv(num_hidden, COLUMNS)
    for piece in range(tl.program_id(0), tl.sum(tiles, 0) * across, tl.num_programs(0)):
        tile = piece // across
        expert, rows, inside = _rows(tile, number, tiles, EXPERTS, ROWS)
        tokens = tl.load(choices + rows, mask=inside, other=0).to(tl.int32) % num_tokens
        columns = (piece % across) * COLUMNS + tl.arange(0, COLUMNS)
        matrix = inner + expert.to(tl.int64) * width * num_hidden
        sums = _product(
            x, tokens, inside, matrix, columns, width, num_hidden,
            inner_bias + expert * num_hidden, PRECISION, WIDEN, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        places = rows[:, None].to(tl.int64) * num_hidden + columns[None, :]
        there = inside[:, None] & (columns < num_hidden)[None, :]
        rounded = sums.to(hidden.dtype.element_ty)  # GELU sees it so in plain PyTorch, too
        if KEEP:
            tl.store(before + places, rounded, mask=there)
        value = rounded.to(tl.float32)
        # (1 + tanh u) / 2 is the logistic function of 2u.
        twice = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        value = value * tl.sigmoid(twice)
        tl.store(hidden + places, value.to(hidden.dtype.element_ty), mask=there)
        tl.debug_barrier()  # as in `_barrier`
        tl.atomic_add(ready + tile, 1, sem="release", scope="gpu")


@triton.jit
def _outer(
    hidden, counts, outer, outer_bias, made, ready, num_experts, width, num_hidden,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    number, tiles = _tiles(counts, num_experts, EXPERTS, ROWS)
    across, needed = tl.cdiv(width, COLUMNS), tl.cdiv(num_hidden, COLUMNS)
    programs = tl.num_programs(0)
    # The program goes on whose turn it is after the last tile of `inner`.
    begin = (tl.program_id(0) + programs - tl.sum(tiles, 0) * needed % programs) % programs
    for piece in range(begin, tl.sum(tiles, 0) * across, programs):
        tile = piece // across
        while tl.atomic_add(ready + tile, 0, sem="acquire", scope="gpu") < needed:
            pass
        tl.debug_barrier()
        expert, rows, inside = _rows(tile, number, tiles, EXPERTS, ROWS)
        columns = (piece % across) * COLUMNS + tl.arange(0, COLUMNS)
        matrix = outer + expert.to(tl.int64) * width * num_hidden
        sums = _product(
            hidden, rows, inside, matrix, columns, num_hidden, width,
            outer_bias + expert * width, PRECISION, WIDEN, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        places = rows[:, None].to(tl.int64) * width + columns[None, :]
        there = inside[:, None] & (columns < width)[None, :]
        tl.store(made + places, sums.to(made.dtype.element_ty), mask=there)


@triton.jit
def _combine(
    made, row, weight, out, num_tokens, width,
    ACTIVE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, COLUMNS)
    pieces = tl.cdiv(num_tokens, TOKENS) * across
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        tokens = (piece // across) * TOKENS + tl.arange(0, TOKENS)
        columns = (piece % across) * COLUMNS + tl.arange(0, COLUMNS)
        there, inside = tokens < num_tokens, (columns < width)[None, :]
        sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for choice in tl.static_range(ACTIVE):
            at = tl.load(row + choice * num_tokens + tokens, mask=there, other=-1)
            share = tl.load(weight + choice * num_tokens + tokens, mask=there, other=0.0)
            places = at[:, None].to(tl.int64) * width + columns[None, :]
            kept = (at >= 0)[:, None]
            value = tl.load(made + places, mask=kept & inside, other=0.0).to(tl.float32)
            # A token that was left out adds nothing, even where its weight is not a number.
            sums += tl.where(kept, value * share[:, None], 0.0)
        places = tokens[:, None].to(tl.int64) * width + columns[None, :]
        tl.store(out + places, sums, mask=there[:, None] & inside)


@triton.jit
def layer(
    x, gate, inner, inner_bias, outer, outer_bias,
    cast, logits, expert, weight, numbers, choices, row, counts, wanted,
    before, hidden, made, out, arrived, ready,
    num_tokens, num_experts, width, num_hidden, most,
    ACTIVE: tl.constexpr, CAST: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    FIRST: tl.constexpr, AFTER: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The stages from FIRST up to, but without, AFTER.

    A = k T assignments, number c T + t for choice c of token t. "Computed" is the type that the
    experts compute in, fp32 or bf16. All pointers are to contiguous memory.

    Args, read only:
        x: [T, width], fp32 or bf16.
        gate: [E, width].
        inner, inner_bias, outer, outer_bias: as in `Experts`, computed.
        most: an expert takes at most so many assignments.
        ACTIVE: k.
        CAST: whether `x` has to be cast before it is computed.
        KEEP: whether `before` is written.
        PRECISION: of products of fp32, see `tl.dot`.
        WIDEN: whether products are of fp32 in any case.
        TOKENS, ROWS, COLUMNS, DEPTH: see `Plan`.
        EXPERTS: a power of 2, at least E and 16.

    Args, written:
        cast: [T, width], `x` as it is computed, if CAST.
        logits: fp32 [T, E].
        expert: int32 [k, T].
        weight: fp32 [k, T], g.
        numbers: int32 [k ⌈T / TOKENS⌉, E], assignments of each expert by each block of tokens.
        choices: int64 [A], numbers of the assignments in the order of their rows.
        row: int32 [k, T], the row of an assignment; -1 where the expert had no room.
        counts, wanted: int64 [E], rows of each expert, and assignments with those without room.
        before, hidden: [A, num_hidden], computed; what GELU sees and makes.
        made: [A, width], computed; what the experts make.
        out: fp32 [T, width].
        arrived: int32, 0 before the launch.
        ready: int32, one for each tile of rows, 0 before the launch.
    """
    if FIRST <= GATE:
        _gate(
            x, gate, cast, logits, expert, weight, numbers, num_tokens, width, num_experts,
            ACTIVE, CAST, TOKENS, EXPERTS, 32,
        )  # fmt: skip
        if AFTER > DISPATCH:
            _barrier(arrived, 1)
    if FIRST <= DISPATCH and AFTER > DISPATCH:
        _dispatch(
            expert, numbers, choices, row, counts, wanted, num_tokens, num_experts, most,
            ACTIVE, TOKENS, EXPERTS,
        )  # fmt: skip
        if AFTER > INNER:
            _barrier(arrived, 2)
    if FIRST <= INNER and AFTER > INNER:
        source = x
        if CAST:
            source = cast
        _inner(
            source, choices, counts, inner, inner_bias, before, hidden, ready,
            num_tokens, num_experts, width, num_hidden,
            KEEP, PRECISION, WIDEN, EXPERTS, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
    if FIRST <= OUTER and AFTER > OUTER:
        _outer(
            hidden, counts, outer, outer_bias, made, ready, num_experts, width, num_hidden,
            PRECISION, WIDEN, EXPERTS, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        if AFTER > COMBINE:
            _barrier(arrived, 3)
    if AFTER > COMBINE:
        _combine(made, row, weight, out, num_tokens, width, ACTIVE, TOKENS, COLUMNS)
