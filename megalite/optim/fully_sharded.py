"""ZeRO stage 3: data-parallel ranks share out the weights, as well as their gradients and Adam's state."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.observer import Observer, observed
from megalite.optim.adamw import AdamW
from megalite.optim.gradients import MESSAGE_DTYPES, main_dtype
from megalite.optim.loss_scaler import build_loss_scaler
from megalite.optim.norm import global_norm, sum_of_squares
from megalite.optim.part import Part
from megalite.optim.rows import Rows
from megalite.optim.sharding import share_out
from megalite.optim.update import ClippedUpdate
from megalite.parallel.collectives import all_reduce
from megalite.parallel.shard import num_used
from megalite.topology import Topology


class FullyShardedOptimizer:
    """What `Optimizer` is to a rank with whole weights, to one that has some rows of each parameter.

    Attributes:
        rows: of each parameter.
        scaler: gives the factor that the loss of each backward pass must be multiplied by.
        observers: told of each part of the work, by the name of Megatron-LM's timer.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        config: OptimizerConfig,
        parallel: ParallelConfig,
        topology: Topology,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        """Gives the module its initial weights, as `share_out` does, and makes the state.

        Args:
            module: the whole model; `blocks` are its parts that are gathered one at a time.
            parallel: the dtype of gradients on their way, and whether parameters that are not cut over tp
                get the gradient of their own rank's positions alone.
            dtype: that the model computes in.
            seed: keys the initial weights.
        """
        message_dtype = MESSAGE_DTYPES[parallel.grad_communication_dtype]
        self.topology = topology
        self.dtype = dtype
        self.sums_over_tp = parallel.sequence_parallel and topology.tp.size > 1
        self.rows = share_out(module, blocks, seed, topology, dtype, message_dtype)
        assert isinstance(module, FSDPModule)
        self.root = module
        self.held = [rows for rows in self.rows if rows.main.numel() > 0]
        self.adamw = AdamW(self.held, config, topology.device)
        self.scaler = build_loss_scaler(config, dtype)
        self.observers: list[Observer[str]] = []
        self.update = ClippedUpdate(self.adamw, self.scaler, config.clip_grad, self.observers)

    def begin(self, num_microbatches: int) -> None:
        """Empties the gradients; each microbatch's are summed over the ranks, and added, as backward runs."""
        self.finish_weights()
        for rows in self.rows:
            rows.parameter.grad = None

    def finish_gradients(self, scale: Tensor | None = None) -> Tensor:
        """Completes the gradients over all ranks.

        Args:
            scale: a scalar on the device that they are multiplied by.

        Returns:
            Their global norm, as if the scaler had not scaled the loss: an fp64 scalar on the device.
        """
        with observed(self.observers, "all-grads-sync"):
            if self.sums_over_tp:
                self._sum_over_tp()
        with observed(self.observers, "optimizer-unscale-and-check-inf"):
            if scale is not None:
                torch._foreach_mul_([rows.gradient for rows in self.held], scale)
            counted = (rows.gradient for rows in self._counted())
            return global_norm(counted, self.topology) / self.scaler.scale

    def params_norm(self) -> float:
        """As `Optimizer.params_norm`."""
        counted = (self._used(rows, rows.main) for rows in self._counted())
        return global_norm(counted, self.topology).item()

    def num_zeros(self) -> int:
        """As `Optimizer.num_zeros`."""
        count = torch.zeros((), dtype=torch.int64, device=self.topology.device)
        for rows in self._counted():
            count += (self._used(rows, rows.gradient) == 0.0).sum()
        return int(all_reduce(count, self.topology.world).item())

    def gradient_squares(self) -> dict[str, Tensor]:
        """As `Optimizer.gradient_squares`."""
        device = self.topology.device
        return {rows.name: sum_of_squares([rows.gradient], device) for rows in self._counted()}

    def bad_gradients(self) -> list[str]:
        """Names of the parameters of whose complete gradient this rank has a part that is not finite."""
        return [rows.name for rows in self.held if not rows.gradient.isfinite().all()]

    def step(
        self, learning_rate: float, weight_decay: float, grad_norm: Tensor, is_allowed: Tensor | None = None
    ) -> None:
        """As `Optimizer.step`."""
        gradients = [rows.gradient for rows in self.held]
        self.update(gradients, learning_rate, weight_decay, grad_norm, is_allowed)

    def finish_weights(self) -> None:
        """Gives up what an evaluation has left whole: to be called before weights are read or changed."""
        self.root.reshard()

    def weight(self, name: str) -> Tensor:
        """A parameter's main weights, in its local shape; every rank of dp calls it."""
        return self._rows_of(name).whole_weight()

    def gradient(self, name: str) -> Tensor:
        """A parameter's complete gradient, in its local shape and unscaled; every rank of dp calls it."""
        return self._rows_of(name).whole_gradient() / self.scaler.scale

    def weights(self) -> dict[str, Part]:
        """What a checkpoint holds of the model's weights: views, or the main weights rounded.

        Those rounded are there for a run that has them; to write to them changes nothing.
        """
        return {rows.name: rows.part(rows.main.to(self.dtype)) for rows in self.rows}

    def state(self) -> dict[str, Tensor | Part]:
        """What a checkpoint holds besides the model's weights, as views; the names are `Optimizer`'s."""
        state: dict[str, Tensor | Part] = {}
        for rows in self.rows:
            if main_dtype(self.dtype) != self.dtype:
                state[f"{rows.name}.main"] = rows.part(rows.main)
            state |= {f"{rows.name}.{moment}": rows.part(tensor) for moment, tensor in rows.moments.items()}
        scaler = {f"loss_scaler.{name}": tensor for name, tensor in self.scaler.state().items()}
        return {**state, "num_steps": self.adamw.num_steps, **scaler}

    def _rows_of(self, name: str) -> Rows:
        (found,) = (rows for rows in self.rows if rows.name == name)
        return found

    def _counted(self) -> list[Rows]:
        """What this rank counts of the model: what each tp rank has is counted once."""
        return [rows for rows in self.held if rows.is_cut or self.topology.tp.is_first]

    def _used(self, rows: Rows, tensor: Tensor) -> Tensor:
        """Return those of a tensor of these rows' elements that are no padding."""
        return tensor[: max(0, num_used(rows.spec, self.topology) - rows.start)]

    @torch.no_grad()
    def _sum_over_tp(self) -> None:
        """Completes the gradients of parameters that every tp rank has, in one message."""
        if partial_sums := [rows.gradient for rows in self.held if not rows.is_cut]:
            total = all_reduce(torch.cat(partial_sums), self.topology.tp)
            sizes = [tensor.numel() for tensor in partial_sums]
            torch._foreach_copy_(partial_sums, list(total.split(sizes)))
