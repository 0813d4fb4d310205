"""A program of one's own for `megalite judge`: a small language model over data and tensor parallel ranks.

megalite judge examples/judge/judged_program.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import Config
from megalite.observe.judge.program import Piece, Program
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError

LAYOUTS = ("tp2", "dp2", "tp2dp2", "dp4")


class Copy(torch.autograd.Function):
    """Copy to the tensor-parallel ranks; backward sums over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """Sum over the tensor-parallel ranks; backward copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Model(nn.Module):
    """Word embedding, an MLP cut over tp, and a head."""

    def __init__(self, vocab: int, hidden: int, tp: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.embedding = nn.Embedding(vocab, hidden)
        self.norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden // tp, bias=False)
        self.down = nn.Linear(4 * hidden // tp, hidden, bias=False)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.down(F.gelu(self.up(Copy.apply(self.norm(x), self.group))))
        return self.head(x + Sum.apply(y, self.group))


class JudgedModel(Program):
    """The model, its optimizer and its groups on one rank."""

    def __init__(self, layout: Layout, config: Config) -> None:
        self.tp, self.dp = layout.size("tp"), layout.size("dp")
        rank = dist.get_rank()
        self.tp_rank, self.dp_rank = rank % self.tp, rank // self.tp
        groups = [dist.new_group([d * self.tp + t for t in range(self.tp)]) for d in range(self.dp)]
        self.dp_groups = [dist.new_group([d * self.tp + t for d in range(self.dp)]) for t in range(self.tp)]
        torch.manual_seed(1)
        vocab, hidden = config.model.vocab_size, config.model.hidden_size
        assert vocab is not None
        self.model = Model(vocab, hidden, self.tp, groups[self.dp_rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def pieces(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Piece]:
        cuts = {"up.weight": 0, "down.weight": 1}
        return {
            name: Piece.cut(each, cuts[name], self.tp_rank, self.tp) if name in cuts else Piece.whole(each)
            for name, each in tensors
        }

    def weights(self) -> dict[str, Piece]:
        return self.pieces(self.model.named_parameters())

    def gradients(self) -> dict[str, Piece]:
        named = self.model.named_parameters()
        return self.pieces((name, each.grad) for name, each in named if each.grad is not None)

    def backward(self, samples: Tensor) -> dict[str, float]:
        self.optimizer.zero_grad()
        own = samples.chunk(self.dp)[self.dp_rank]
        loss = F.cross_entropy(self.model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        group = self.dp_groups[self.tp_rank]
        for piece in self.gradients().values():
            dist.all_reduce(piece.tensor, group=group)
            piece.tensor.div_(self.dp)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        return {"loss": mean.item() / self.dp}

    def update(self) -> dict[str, float]:
        self.optimizer.step()
        return {}

    def modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules())

    def save(self, folder: Path) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, folder / f"{self.tp}-{self.tp_rank}.pt")

    def resume(self, folder: Path) -> None:
        path = folder / f"{self.tp}-{self.tp_rank}.pt"
        if not path.is_file():
            raise UserError("a checkpoint of another tp cannot be loaded")
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def build(layout: Layout, config: Config, options: Mapping[str, str]) -> Program:
    """Return the program of this rank."""
    if options or set(layout.sizes) - {"tp", "dp"} or layout.switches:
        raise UserError(f"the program knows tp and dp alone, not {layout} and {options}")
    return JudgedModel(layout, config)
