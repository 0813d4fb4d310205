"""Let torch's FSDP run on meta tensors, which it refuses to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch


@contextmanager
def fsdp_on_meta() -> Iterator[None]:
    """Let `fully_shard` shard, all-gather and reduce-scatter meta tensors in this block.

    FSDP takes its streams and events from the module of the device type, ``torch.cuda`` or ``torch.cpu``; on
    the latter they do nothing.
    """
    from torch.distributed.fsdp._fully_shard import _fully_shard as interface  # seconds to import
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "meta", torch.cpu, create=True))
        stack.enter_context(
            patch.object(interface, "_get_device_from_mesh", lambda mesh: torch.device("meta"))
        )
        stack.enter_context(patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda group: None))
        yield
