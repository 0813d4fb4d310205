"""Errors for the fake device to find: each is code that runs on a CPU, and that a GPU refuses or waits for.

Imported in the process that has loaded the fake device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.data import batch_loader
from megalite.data.microbatch import Microbatch
from megalite.distributed import collectives
from megalite.optim import gradient_buckets
from megalite.pipeline import executor

Change = Callable[..., AbstractContextManager[Any]]


def _changed(owner: Any, name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace a function with one that gets the original first."""
    return mock.patch.object(owner, name, partial(change, getattr(owner, name)))


def _expanded(on_host: Callable[..., Microbatch], microbatch: Microbatch, device: torch.device) -> Microbatch:
    one = microbatch.tokens[:1, :1].expand(microbatch.tokens.shape)
    return on_host(replace(microbatch, tokens=one), device)


def _pageable(_: Any, microbatch: Microbatch, device: torch.device) -> Microbatch:
    return microbatch


def _transposed(gather: Callable[..., Any], whole: Tensor, mine: Tensor, **options: Any) -> Any:
    return gather(whole, mine.view(2, -1).t(), **options)


def _short(gather: Callable[..., Any], whole: Tensor, mine: Tensor, **options: Any) -> Any:
    return gather(whole[1:], mine, **options)


def _as_int16(reduce: Callable[..., Any], x: Tensor, *rest: Any, **options: Any) -> Any:
    return reduce(x.to(torch.int16), *rest, **options)


def _with_host(reduce: Callable[..., Any], x: Tensor, *rest: Any, **options: Any) -> Any:
    dist.all_reduce_coalesced([x, torch.zeros(1)], group=rest[0].group)
    return reduce(x, *rest, **options)


def _without_elements(launch: Callable[..., Any], group: Any, receives: Any, send: Any) -> Any:
    return launch(group, receives, None if send is None else (send[0][:0], send[1]))


def _to_one_element(reduce: Callable[..., Any], x: Tensor, *rest: Any, **options: Any) -> Any:
    x.new_empty(1).expand(x.numel()).copy_(x.flatten())
    return reduce(x, *rest, **options)


INJECTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": lambda: mock.patch.dict({}),
    "expanded tokens are pinned": lambda: _changed(batch_loader, "_on_host", _expanded),
    "tokens are copied from pageable memory": lambda: _changed(batch_loader, "_on_host", _pageable),
    "an expanded tensor is written": lambda: _changed(gradient_buckets, "start_all_reduce", _to_one_element),
    "transposed memory is gathered": lambda: _changed(collectives, "all_gather_single", _transposed),
    "a gather has a part too few": lambda: _changed(collectives, "all_gather_single", _short),
    "integers of 16 bits are summed": lambda: _changed(gradient_buckets, "start_all_reduce", _as_int16),
    "host and device are summed": lambda: _changed(gradient_buckets, "start_all_reduce", _with_host),
    "a message has no elements": lambda: _changed(executor, "_launch_together", _without_elements),
}
"""Blocks with an error in the code; the empty name is a block without one."""
