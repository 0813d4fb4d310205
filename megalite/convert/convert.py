"""A model from one program's files to another's, a tensor at a time: memory holds about one layer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from megalite.convert.hf import family_of
from megalite.convert.parameters import parameters_of
from megalite.convert.precision import loses, rounded
from megalite.convert.settings import Settings
from megalite.convert.source import KINDS, Source, kind_of
from megalite.convert.target import TARGETS, Order, size_text, whole_folder
from megalite.errors import UserError
from megalite.log import log

_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Conversion:
    """What is asked for.

    Attributes:
        source, target: names in KINDS and TARGETS; None: as the folder looks like, and the other one.
        iteration: of a source that has several; None for its latest.
        max_bytes: of one of Hugging Face's files.
        settings: what the user says otherwise about model and tokenizer.
    """

    load: Path
    save: Path
    source: str | None = None
    target: str | None = None
    iteration: int | None = None
    max_bytes: int = 5 * 10**9
    settings: Settings = field(default_factory=Settings)

    def run(self) -> None:
        """Does it, and says what was done and how to go on.

        Raises:
            UserError: the source is damaged, of no known form or of a model that cannot be converted, or the
                target is there already or cannot be written.
        """
        kind = self.source or kind_of(self.load)
        target = self.target or ("hf" if kind == "megalite" else "megalite")
        source = KINDS[kind].open(self.load, self.iteration, self.settings)
        if target == "hf":
            family_of(source.config.model)
        specs = parameters_of(source.config.model)
        order = Order(source.config, source.progress, specs, self.max_bytes, self.save, source.hugging_face)
        log.info(
            "%s (%s): %d tensors, %s in %s",
            *(self.load, KINDS[kind].title, len(order.specs)),
            *(size_text(order.num_bytes), source.config.model.params_dtype),
        )
        _tell_rounding(source, order)
        with whole_folder(self.save, order.num_bytes) as folder:
            TARGETS[target](folder, order, _told(_parameters(source, order), order))
        log.info("wrote %s", self.save)


def _parameters(source: Source, order: Order) -> Iterator[tuple[str, Tensor]]:
    for name, spec in order.specs.items():
        full = source.tensor(name)
        if tuple(full.shape) != tuple(spec.used_shape):
            raise UserError(
                f"{name} is {list(full.shape)}, and {list(spec.used_shape)} by the config: is that another "
                "model's?"
            )
        yield name, rounded(name, full, order.dtype)


def _told(parameters: Iterator[tuple[str, Tensor]], order: Order) -> Iterator[tuple[str, Tensor]]:
    """Logs how far long work is."""
    done, last = 0, time.monotonic()
    for name, full in parameters:
        yield name, full
        done += full.nbytes
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            sizes = size_text(done), size_text(order.num_bytes)
            log.info("%s of %s (%.0f%%), at %s", *sizes, 100 * done / order.num_bytes, name)


def _tell_rounding(source: Source, order: Order) -> None:
    """Says how many tensors lose digits."""
    dtypes = Counter(source.dtype_of(name) for name in order.specs)
    for dtype, count in dtypes.items():
        if loses(dtype, order.dtype):
            log.warning("%d tensors of %s are rounded to %s", count, dtype, order.dtype)
