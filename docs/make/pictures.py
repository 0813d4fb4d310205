"""The pages' pictures, each drawn from the code that it shows or from the numbers that it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.chart import TITLES, speed_of
from megalite.pipeline.picture import Colour
from megalite.pipeline.svg import INK, PAPER, WAITING, Drawing, schedule_svg

BLUE, GREEN, TEAL, ORANGE = (66, 119, 214), (46, 158, 107), (29, 158, 150), (232, 156, 48)
RED, VIOLET = (205, 92, 92), (140, 108, 200)
RANKS = (BLUE, ORANGE, GREEN, VIOLET)
"""A colour for each of four ranks."""


def light(colour: Colour) -> Colour:
    """The same, far lighter."""
    red, green, blue = (round(255 - (255 - part) * 0.35) for part in colour)
    return red, green, blue


def tensor_parallel() -> str:
    """The two linear layers of an MLP over two ranks, from the input that both hold to the sum of both."""
    drawing = Drawing(720, 260)
    drawing.words(16, 24, "An MLP on two tensor-parallel ranks: A is cut by columns, B by rows", 14)
    for rank, y in enumerate((56, 156)):
        colour = RANKS[rank]
        drawing.words(16, y + 34, f"rank {rank}", 12)
        _tensor(drawing, 70, y, 60, 60, light(INK), "x", "[s, b, h]")
        drawing.words(146, y + 34, "×", 16)
        _tensor(drawing, 170, y, 40, 60, colour, f"A{rank}", "[h, f/2]")
        drawing.arrow(222, y + 30, 254, y + 30)
        _tensor(drawing, 262, y, 40, 60, light(colour), f"y{rank}", "[s, b, f/2]")
        drawing.words(318, y + 34, "×", 16)
        _tensor(drawing, 342, y + 15, 60, 30, colour, f"B{rank}", "[f/2, h]")
        drawing.arrow(414, y + 30, 446, y + 30)
        _tensor(drawing, 454, y, 60, 60, light(colour), f"z{rank}", "a part of z")
        drawing.arrow(526, y + 30, 562, y + 30)
        _tensor(drawing, 640, y, 60, 60, light(INK), "z", "z0 + z1")
        drawing.arrow(612, y + 30, 636, y + 30)
    drawing.box(566, 56, 44, 160, light(RED), RED)
    drawing.words(588, 132, "all-", 11, anchor="middle")
    drawing.words(588, 146, "reduce", 11, anchor="middle")
    return drawing.text()


def _tensor(
    drawing: Drawing, x: float, y: float, width: float, height: float, colour: Colour, name: str, shape: str
) -> None:
    drawing.box(x, y, width, height, colour, INK)
    ink = PAPER if sum(colour) < 3 * 150 else INK
    drawing.words(x + width / 2, y + height / 2 + 4, name, 12, ink, "middle")
    drawing.words(x + width / 2, y + height + 14, shape, 10, anchor="middle")


def sequence_parallel() -> str:
    """One block of a layer on four ranks: which part of the activations a rank holds at each point."""
    drawing = Drawing(720, 250)
    drawing.words(16, 24, "A block of a layer with --tp 4 --sequence-parallel: what each rank holds", 14)
    steps = (
        ("norm", "[s/4, b, h]", True),
        ("all-gather", "", None),
        ("products of", "[s, b, f/4]", False),
        ("reduce-scatter", "", None),
        ("dropout, sum", "[s/4, b, h]", True),
    )
    x = 84.0
    for title, shape, by_sequence in steps:
        if by_sequence is None:
            drawing.box(x, 52, 40, 152, light(RED), RED)
            drawing.words(x + 20, 226, title, 11, anchor="middle")
            x += 70
            continue
        drawing.words(x + 60, 222, "attention or MLP" if by_sequence is False else title, 11, anchor="middle")
        drawing.words(x + 60, 238, shape, 10, anchor="middle")
        for rank, colour in enumerate(RANKS):
            for piece in range(4):
                if by_sequence:
                    fill = colour if piece == rank else WAITING
                    drawing.box(x + 30 * piece, 52 + 40 * rank, 30, 32, fill, PAPER)
                else:
                    fill = colour if piece == rank else WAITING
                    drawing.box(x, 52 + 40 * rank + 8 * piece, 120, 8, fill, PAPER)
        x += 150
    for rank in range(4):
        drawing.words(16, 72 + 40 * rank, f"rank {rank}", 12)
    return drawing.text()


def data_parallel() -> str:
    """Two replicas at the end of a step: buckets leave while backward goes on."""
    drawing = Drawing(720, 230)
    drawing.words(
        16, 24, "The last microbatch of a step on two replicas: gradients travel under backward", 14
    )
    spans = (("forward", 84, 120, BLUE), ("backward", 204, 240, GREEN), ("update", 488, 60, VIOLET))
    for replica, y in enumerate((48, 128)):
        drawing.words(16, y + 20, f"replica {replica}", 12)
        for name, x, width, colour in spans:
            drawing.box(x, y, width, 28, colour, PAPER)
            drawing.words(x + width / 2, y + 18, name, 11, PAPER, "middle")
        drawing.words(16, y + 48, "messages", 11)
        drawing.box(84, y + 34, 560, 20, WAITING)
        for number, (x, width) in enumerate(((264, 56), (324, 56), (384, 56), (444, 40))):
            drawing.box(x, y + 34, width, 20, light(RED), RED)
            drawing.words(
                x + width / 2, y + 48, f"bucket {number}" if width > 40 else str(number), 10, anchor="middle"
            )
        drawing.box(548, y + 34, 96, 20, light(ORANGE), ORANGE)
        drawing.words(596, y + 48, "weights (ZeRO)", 10, anchor="middle")
    drawing.words(
        84,
        214,
        "What is left after backward is the last bucket. Weights travel under the next forward "
        "with --overlap-param-gather.",
        11,
    )
    return drawing.text()


STATES = (("weights", 2, BLUE), ("gradients", 4, ORANGE), ("main weights, moments", 12, GREEN))
"""Bytes of a parameter with --bf16 and Adam."""
SHARED = {0: (), 1: (2,), 2: (1, 2), 3: (0, 1, 2)}
"""Which of STATES the replicas share out at each ZeRO stage."""


def bytes_a_parameter(stage: int, replicas: int) -> Sequence[float]:
    """Bytes of each of STATES that one replica holds of a parameter, whatever a collective needs besides."""
    return [
        size / replicas if number in SHARED[stage] else size for number, (_, size, _) in enumerate(STATES)
    ]


def zero_stages(replicas: int = 8) -> str:
    """Bytes that one replica holds of a parameter at each ZeRO stage."""
    drawing = Drawing(720, 210)
    drawing.words(16, 24, f"Bytes of a parameter on each of {replicas} replicas, --bf16 with Adam", 14)
    for stage in SHARED:
        y, x = 44 + 32 * stage, 110.0
        sizes = bytes_a_parameter(stage, replicas)
        drawing.words(16, y + 16, f"--zero-stage {stage}", 11)
        for size, (_, _, colour) in zip(sizes, STATES, strict=True):
            drawing.box(x, y, 30 * size, 24, colour, PAPER)
            x += 30 * size
        drawing.words(x + 8, y + 16, f"{sum(sizes):.2f}".rstrip("0").rstrip("."), 12)
    x = 110.0
    for name, _, colour in STATES:
        drawing.box(x, 184, 12, 12, colour)
        drawing.words(x + 17, 194, name, 11)
        x += 40 + 6.5 * len(name)
    return drawing.text()


def layout() -> str:
    """Where the 16 ranks of tp 4, pp 2, dp 2 stand on nodes of 8."""
    drawing = Drawing(720, 230)
    drawing.words(16, 24, "--tp 4 --pp 2 on two nodes of 8: rank = (pp × 2 + dp) × 4 + tp", 14)
    for node in range(2):
        drawing.box(16 + 352 * node, 40, 336, 150, WAITING, INK)
        drawing.words(24 + 352 * node, 58, f"node {node}: stage {node}", 12)
        for replica in range(2):
            y = 70 + 58 * replica
            drawing.words(24 + 352 * node, y + 28, f"dp {replica}", 11)
            for tp in range(4):
                x = 64 + 352 * node + 70 * tp
                drawing.box(x, y, 62, 46, RANKS[tp] if replica == 0 else light(RANKS[tp]), PAPER)
                rank = (node * 2 + replica) * 4 + tp
                ink = PAPER if replica == 0 else INK
                drawing.words(x + 31, y + 20, f"rank {rank}", 11, ink, "middle")
                drawing.words(x + 31, y + 36, f"tp {tp}", 10, ink, "middle")
    drawing.words(
        16,
        214,
        "A row is one tensor-parallel group; one colour of a node is a data-parallel group; "
        "one place in both nodes is a pipeline.",
        11,
    )
    return drawing.text()


PICTURES: Mapping[str, Callable[[], str]] = {
    "tensor_parallel.svg": tensor_parallel,
    "sequence_parallel.svg": sequence_parallel,
    "data_parallel.svg": data_parallel,
    "zero.svg": zero_stages,
    "layout.svg": layout,
    "gpipe.svg": partial(schedule_svg, "gpipe", 4, 8),
    "1f1b.svg": partial(schedule_svg, "1f1b", 4, 8),
    "interleaved.svg": partial(schedule_svg, "interleaved", 4, 8, 2),
    "zb-h1.svg": partial(schedule_svg, "zb-h1", 4, 8),
    "zb-v.svg": partial(schedule_svg, "zb-v", 4, 8),
    **{f"speed_of_{name}.svg": partial(speed_of, name) for name in TITLES},
}
"""By the file's name in docs/pictures."""
