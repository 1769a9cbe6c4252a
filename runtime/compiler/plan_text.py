"""A plan for people: its sizes, every block of the arena, and a picture of the arena over time."""

from __future__ import annotations

from euler_ir.plan import ALIGNMENT, Block, Place, Plan, size_text

_COLUMNS, _ROWS = 64, 24
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def describe(plan: Plan) -> str:
    """The plan as text: peak and lower bound, the picture, then a table of all blocks."""
    function, last = plan.function, len(plan.steps) - 1
    ratio = plan.arena_bytes / plan.lower_bound if plan.lower_bound else 1.0
    inputs = sum(value.type.bytes for value in function.inputs)
    lines = [
        f"@{function.name}: {len(plan.steps)} steps, {len(plan.places)} values",
        f"arena {size_text(plan.arena_bytes)}, lower bound {size_text(plan.lower_bound)} "
        f"(ratio {ratio:.3f}); inputs {size_text(inputs)} in buffers of their own",
        *_donations(plan),
        *(f"copy {_place(copy.source)} → {_place(copy.target)}, {size_text(copy.size)}"
          for copy in plan.copies),
    ]
    blocks = sorted((block for block in plan.blocks if block.size),
                    key=lambda block: (block.first, block.offset))
    if not blocks:
        return "\n".join(lines) + "\n"
    letters = {id(block): _LETTERS[i % len(_LETTERS)] for i, block in enumerate(blocks)}
    lines += ["", *_picture(plan, blocks, letters), "",
              f"   {'offset':>12} {'bytes':>12}  {'steps':<11} values"]
    lines += [f" {letters[id(block)]} {block.offset:>12} {block.size:>12}  "
              f"{f'{block.first}-{min(block.last, last)}':<11} {_contents(plan, block)}"
              for block in blocks]
    return "\n".join(lines) + "\n"


def _donations(plan: Plan) -> list[str]:
    """How donated inputs' buffers come to hold the outputs: most are written in place."""
    copied = []
    for name, output in plan.function.donations.items():
        place = plan.places[plan.function.output(output)]
        if place != Place(0, name):
            copied.append(f"  %{name} holds {output} by a copy from {_place(place)}")
    total = len(plan.function.donations)
    return [f"{total - len(copied)} of {total} donated inputs written in place", *copied]


def _contents(plan: Plan, block: Block) -> str:
    """What a block is for: its values, each in place of the one before."""
    if block.values:
        return " ▸ ".join(f"%{value.name}: {value.type}" for value in block.values)
    if block.first == len(plan.steps):
        return "temporary of the copies"
    return f"workspace of {plan.steps[block.first].kernel.node.op.name}"


def _picture(plan: Plan, blocks: list[Block], letters: dict[int, str]) -> list[str]:
    """Addresses upwards, steps to the right. A cell shows the block that has most of its bytes at
    its column's first step, or a dot where less than half of them are in use."""
    steps = len(plan.steps) + bool(plan.copies)
    columns = min(_COLUMNS, steps)
    height = plan.arena_bytes / _ROWS
    shown = [[""] * columns for _ in range(_ROWS)]
    for column in range(columns):
        step = column * steps // columns
        used, largest = [0.0] * _ROWS, [0.0] * _ROWS
        for block in blocks:
            if not block.first <= step <= block.last:
                continue
            stop = block.offset + -(-block.size // ALIGNMENT) * ALIGNMENT
            for row in range(int(block.offset / height), min(int(stop / height) + 1, _ROWS)):
                part = min(stop, (row + 1) * height) - max(block.offset, row * height)
                used[row] += part
                if part > largest[row]:
                    largest[row], shown[row][column] = part, letters[id(block)]
        for row in range(_ROWS):
            if used[row] < height / 2:
                shown[row][column] = "."
    margin = len(size_text(plan.arena_bytes)) + 1
    lines = [f"{size_text(round(row * height)):>{margin}} |{''.join(shown[row])}|"
             for row in reversed(range(_ROWS))]
    first, last = "step 0", str(steps - 1)
    return [*lines, f"{'':{margin}}  {first}{last:>{max(columns - len(first), len(last) + 1)}}"]


def _place(place: Place) -> str:
    return f"{'arena' if place.base is None else '%' + place.base}+{place.offset}"
