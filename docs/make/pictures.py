"""Draw the pictures of the documentation, from the code and the numbers that they illustrate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.chart import TITLES, speed_of
from megalite.pipeline.draw_schedule import INK, PAPER, WAITING, Colour, Drawing, schedule_svg
from megalite.plan.plan_request import read_request
from megalite.plan.scaling import plan_scaling, scaling_svg, scaling_title

BLUE, GREEN, TEAL, ORANGE = (66, 119, 214), (46, 158, 107), (29, 158, 150), (232, 156, 48)
RED, VIOLET = (205, 92, 92), (140, 108, 200)
RANKS = (BLUE, ORANGE, GREEN, VIOLET)
"""Colours of ranks 0 to 3."""


def light(colour: Colour) -> Colour:
    """Return a much lighter shade of the colour."""
    red, green, blue = (round(255 - (255 - part) * 0.35) for part in colour)
    return red, green, blue


def overview() -> str:
    """Draw one model on 8 ranks: tensor-parallel slices, pipeline stages and data-parallel replicas.

    The README shows it, on phones too. They have about 330 pixels for it, so its smallest text has 9 there.
    """
    drawing = Drawing(430, 406)
    drawing.text(6, 20, "A GPT of 12 layers on 8 ranks: --tp 2 --pp 2,", 14)
    drawing.text(6, 38, "which leaves 2 data-parallel replicas", 14)
    stages = (("stage 0: embedding, layers 0-5", -8), ("stage 1: layers 6-11, output, loss", 80))
    for stage, (name, to_name) in enumerate(stages):
        y = 88 + 116 * stage
        drawing.text(6, y + to_name, name)
        _mark(drawing, 215, y + 32, "dp")
        for replica, x in enumerate((6, 228)):
            _mark(drawing, x + 98, y + 32, "tp")
            for tp in range(2):
                rank = (stage * 2 + replica) * 2 + tp
                left, middle = x + 110 * tp, x + 110 * tp + 43
                drawing.box(left, y, 86, 64, RANKS[tp], PAPER)
                drawing.text(middle, y + 20, f"rank {rank}", 13, PAPER, "middle")
                drawing.text(middle, y + 38, "half of", ink=PAPER, anchor="middle")
                drawing.text(middle, y + 53, "each matrix", ink=PAPER, anchor="middle")
                if stage == 0:
                    drawing.arrow(middle - 8, y + 68, middle - 8, y + 112)
                    drawing.arrow(middle + 8, y + 112, middle + 8, y + 68)
    for replica, middle in enumerate((104, 326)):
        drawing.text(middle, 62, f"replica {replica}", anchor="middle")
        _mark(drawing, middle, 178, "pp")
    for number, line in enumerate(
        (
            "tp: each layer sums its partial results over the ranks",
            "that share its matrices.",
            "pp: a stage sends hidden states to the next stage,",
            "and gets their gradients back.",
            "dp: replicas train on different samples and average",
            "their gradients.",
        )
    ):
        drawing.text(6 + 22 * (number % 2), 312 + 17 * number, line)
    return drawing.content()


def _mark(drawing: Drawing, x: float, y: float, axis: str) -> None:
    """Draw the name of the axis along which the ranks on both sides of a point communicate."""
    drawing.box(x - 11, y - 13, 22, 26, PAPER, INK)
    drawing.text(x, y + 4, axis, anchor="middle")


def tensor_parallel() -> str:
    """Draw the two linear layers of an MLP on two ranks, from the shared input to the all-reduced output."""
    drawing = Drawing(720, 260)
    drawing.text(16, 24, "An MLP on two tensor-parallel ranks: A is cut by columns, B by rows", 14)
    for rank, y in enumerate((56, 156)):
        colour = RANKS[rank]
        drawing.text(16, y + 34, f"rank {rank}", 12)
        _tensor(drawing, 70, y, 60, 60, light(INK), "x", "[s, b, h]")
        drawing.text(146, y + 34, "×", 16)
        _tensor(drawing, 170, y, 40, 60, colour, f"A{rank}", "[h, f/2]")
        drawing.arrow(222, y + 30, 254, y + 30)
        _tensor(drawing, 262, y, 40, 60, light(colour), f"y{rank}", "[s, b, f/2]")
        drawing.text(318, y + 34, "×", 16)
        _tensor(drawing, 342, y + 15, 60, 30, colour, f"B{rank}", "[f/2, h]")
        drawing.arrow(414, y + 30, 446, y + 30)
        _tensor(drawing, 454, y, 60, 60, light(colour), f"z{rank}", "partial z")
        drawing.arrow(526, y + 30, 562, y + 30)
        _tensor(drawing, 640, y, 60, 60, light(INK), "z", "z0 + z1")
        drawing.arrow(612, y + 30, 636, y + 30)
    drawing.box(566, 56, 44, 160, light(RED), RED)
    drawing.text(588, 132, "all-", 11, anchor="middle")
    drawing.text(588, 146, "reduce", 11, anchor="middle")
    return drawing.content()


def _tensor(
    drawing: Drawing, x: float, y: float, width: float, height: float, colour: Colour, name: str, shape: str
) -> None:
    drawing.box(x, y, width, height, colour, INK)
    ink = PAPER if sum(colour) < 3 * 150 else INK
    drawing.text(x + width / 2, y + height / 2 + 4, name, 12, ink, "middle")
    drawing.text(x + width / 2, y + height + 14, shape, 10, anchor="middle")


def sequence_parallel() -> str:
    """Draw which part of the activations each of four ranks holds at each step of a block."""
    drawing = Drawing(720, 250)
    drawing.text(16, 24, "Activations that each rank holds in one block, with --tp 4 --sequence-parallel", 14)
    steps = (
        ("norm", "[s/4, b, h]", True),
        ("all-gather", "", None),
        ("attention or MLP", "[s, b, f/4]", False),
        ("reduce-scatter", "", None),
        ("dropout, residual", "[s/4, b, h]", True),
    )
    x = 84.0
    for title, shape, by_sequence in steps:
        if by_sequence is None:
            drawing.box(x, 52, 40, 152, light(RED), RED)
            drawing.text(x + 20, 226, title, 11, anchor="middle")
            x += 70
            continue
        drawing.text(x + 60, 222, title, 11, anchor="middle")
        drawing.text(x + 60, 238, shape, 10, anchor="middle")
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
        drawing.text(16, 72 + 40 * rank, f"rank {rank}", 12)
    return drawing.content()


def data_parallel() -> str:
    """Draw the last microbatch of an iteration on two replicas: buckets are reduced during backward."""
    drawing = Drawing(720, 230)
    drawing.text(
        16,
        24,
        "The last microbatch of an iteration on two replicas: gradients are reduced during backward",
        14,
    )
    spans = (("forward", 84, 120, BLUE), ("backward", 204, 240, GREEN), ("update", 488, 60, VIOLET))
    for replica, y in enumerate((48, 128)):
        drawing.text(16, y + 20, f"replica {replica}", 12)
        for name, x, width, colour in spans:
            drawing.box(x, y, width, 28, colour, PAPER)
            drawing.text(x + width / 2, y + 18, name, 11, PAPER, "middle")
        drawing.text(16, y + 48, "network", 11)
        drawing.box(84, y + 34, 560, 20, WAITING)
        for number, (x, width) in enumerate(((264, 56), (324, 56), (384, 56), (444, 40))):
            drawing.box(x, y + 34, width, 20, light(RED), RED)
            drawing.text(
                x + width / 2, y + 48, f"bucket {number}" if width > 40 else str(number), 10, anchor="middle"
            )
        drawing.box(548, y + 34, 96, 20, light(ORANGE), ORANGE)
        drawing.text(596, y + 48, "weights (ZeRO)", 10, anchor="middle")
    drawing.text(
        16,
        214,
        "Only the last bucket is reduced after backward. On a GPU, weights are gathered during the next "
        "forward.",
        11,
    )
    return drawing.content()


STATES = (("weights", 2, BLUE), ("gradients", 4, ORANGE), ("main weights, moments", 12, GREEN))
"""Name, bytes per parameter with --bf16 and Adam, and colour of each model state."""
SHARED = {0: (), 1: (2,), 2: (1, 2), 3: (0, 1, 2)}
"""Indices of the STATES that each ZeRO stage shards over the replicas."""


def bytes_a_parameter(stage: int, replicas: int) -> Sequence[float]:
    """Return bytes per parameter of each of STATES on one replica, without communication buffers."""
    return [
        size / replicas if number in SHARED[stage] else size for number, (_, size, _) in enumerate(STATES)
    ]


def zero_stages(replicas: int = 8) -> str:
    """Draw the bytes per parameter that one replica holds at each ZeRO stage."""
    drawing = Drawing(720, 210)
    drawing.text(16, 24, f"Bytes per parameter on each of {replicas} replicas, --bf16 with Adam", 14)
    for stage in SHARED:
        y, x = 44 + 32 * stage, 110.0
        sizes = bytes_a_parameter(stage, replicas)
        drawing.text(16, y + 16, f"--zero-stage {stage}", 11)
        for size, (_, _, colour) in zip(sizes, STATES, strict=True):
            drawing.box(x, y, 30 * size, 24, colour, PAPER)
            x += 30 * size
        drawing.text(x + 8, y + 16, f"{sum(sizes):.2f}".rstrip("0").rstrip("."), 12)
    x = 110.0
    for name, _, colour in STATES:
        drawing.box(x, 184, 12, 12, colour)
        drawing.text(x + 17, 194, name, 11)
        x += 40 + 6.5 * len(name)
    return drawing.content()


def layout() -> str:
    """Draw the positions of the 16 ranks of tp 4, pp 2, dp 2 on two nodes of 8."""
    drawing = Drawing(720, 230)
    drawing.text(16, 24, "--tp 4 --pp 2 on two nodes of 8: rank = (pp × 2 + dp) × 4 + tp", 14)
    for node in range(2):
        drawing.box(16 + 352 * node, 40, 336, 150, WAITING, INK)
        drawing.text(24 + 352 * node, 58, f"node {node}: stage {node}", 12)
        for replica in range(2):
            y = 70 + 58 * replica
            drawing.text(24 + 352 * node, y + 28, f"dp {replica}", 11)
            for tp in range(4):
                x = 64 + 352 * node + 70 * tp
                drawing.box(x, y, 62, 46, RANKS[tp] if replica == 0 else light(RANKS[tp]), PAPER)
                rank = (node * 2 + replica) * 4 + tp
                ink = PAPER if replica == 0 else INK
                drawing.text(x + 31, y + 20, f"rank {rank}", 11, ink, "middle")
                drawing.text(x + 31, y + 36, f"tp {tp}", 10, ink, "middle")
    drawing.text(
        16,
        214,
        "A row is a tensor-parallel group; a column of a node is a data-parallel group; "
        "the same position on both nodes is a pipeline.",
        11,
    )
    return drawing.content()


SCALING = (
    *("--preset", "bert-large", "--gpu", "v100-32", "--network-gbps", "1.56", "--ethernet-gbps", "0.375"),
    *("--global-batch-size", "4096", "--micro-batch-size", "16", "--zero-stage", "1", "--fp16"),
    *("--scaling", "1,2,4,8,16"),
)
"""The scaling table of docs/plan.md."""


def scaling() -> str:
    """Draw the efficiency of `SCALING`."""
    request = read_request(SCALING)
    return scaling_svg(list(plan_scaling(request)), scaling_title(request))


PICTURES: Mapping[str, Callable[[], str]] = {
    "overview.svg": overview,
    "tensor_parallel.svg": tensor_parallel,
    "sequence_parallel.svg": sequence_parallel,
    "data_parallel.svg": data_parallel,
    "zero.svg": zero_stages,
    "layout.svg": layout,
    "scaling.svg": scaling,
    "gpipe.svg": partial(schedule_svg, "gpipe", 4, 8),
    "1f1b.svg": partial(schedule_svg, "1f1b", 4, 8),
    "interleaved.svg": partial(schedule_svg, "interleaved", 4, 8, 2),
    "zb-h1.svg": partial(schedule_svg, "zb-h1", 4, 8),
    "zb-v.svg": partial(schedule_svg, "zb-v", 4, 8),
    "dualpipev.svg": partial(schedule_svg, "dualpipev", 4, 10),
    **{f"speed_of_{name}.svg": partial(speed_of, name) for name in TITLES},
}
"""Functions that draw the pictures, by file name in docs/pictures."""
