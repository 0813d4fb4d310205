"""Build the datasets of a run from the parts of the corpora that each split reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.data.blend import (
    MAX_DATASETS,
    BlendedDataset,
    Coverage,
    OnePass,
    log_coverage,
    normalized,
    num_samples_to_build,
)
from megalite.data.corpus_record import DataRecord
from megalite.data.corpus_sources import SPLIT_NAMES, Blend, DataPhases, Sources
from megalite.data.gpt_dataset import Dataset, verify_files
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.mixture import MixtureDataset, MixturePlan, mixture_lines
from megalite.data.samples import Samples
from megalite.data.sharded_dataset import open_dataset
from megalite.data.storage import CACHE_BYTES
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError, few
from megalite.utils.log import log


class NamedDataset(NamedTuple):
    """One of several named datasets that a split is evaluated on.

    Attributes:
        split: "valid" or "test".
    """

    split: str
    name: str
    dataset: Dataset


@dataclass(frozen=True)
class DatasetSplits:
    """Datasets of a run; None if a split needs no samples, or its share of the corpus is empty.

    Attributes:
        named: named datasets to evaluate on, besides `valid` and `test`.
        record: record of the corpora and the parts that are read; None for random tokens, and on ranks
            that read no data.
    """

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    named: tuple[NamedDataset, ...] = ()
    record: DataRecord | None = None

    def evaluated(self, split: str) -> list[tuple[str, Dataset]]:
        """Return the names and datasets that a split is evaluated on; the split's own dataset has no name."""
        own = {"valid": self.valid, "test": self.test}[split]
        named = [(each.name, each.dataset) for each in self.named if each.split == split]
        return named if own is None else [("", own), *named]

    def verify_files(self) -> None:
        """Check that no dataset's files have changed since they were read, without relying on cached status.

        Raises:
            UserError: a file was changed or became unreadable while it was in use.
        """
        datasets = (self.train, self.valid, self.test, *(each.dataset for each in self.named))
        for dataset in datasets:
            if dataset is not None:
                verify_files(dataset)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each dataset, for the log, and its number of samples."""
        for split, dataset in zip(SPLIT_NAMES, (self.train, self.valid, self.test), strict=True):
            if dataset is not None:
                yield split, len(dataset)
        for each in self.named:
            yield f"{each.split} {each.name}", len(each.dataset)


class BuildOptions(NamedTuple):
    """Options that all datasets of a run share.

    Attributes:
        samples: how samples are cut from a corpus.
        blend_by: weight of datasets without one: their number of "tokens", in whole samples, or "documents".
        cache: cache of the samples' orders; without a cache they are built in memory.
        batch_size: samples per batch; training refuses a corpus with fewer samples in total.
        full_validation: build one epoch of each validation set.
        consumed_after: returns the samples that a number of iterations have consumed.
    """

    samples: Samples
    blend_by: str = "tokens"
    cache: IndexCache | None = None
    batch_size: int = 1
    full_validation: bool = False
    consumed_after: Callable[[int], int] = int


def num_samples_per_split(
    train_samples: int, train_iters: int, eval_interval: int, eval_iters: int, global_batch_size: int
) -> tuple[int, int, int]:
    """Return the samples that a whole run draws from train, valid and test.

    Args:
        train_samples: length of the run in samples; 0 if it is set in iterations.
        eval_interval: iterations between two evaluations; 0 for one at the end only.
        eval_iters: batches per evaluation.
    """
    num_evaluations = (train_iters // eval_interval if eval_interval > 0 else 0) + 1
    train = train_samples if train_samples > 0 else train_iters * global_batch_size
    return train, num_evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size


def build_mock_datasets(samples: Samples, num_samples: tuple[int, int, int]) -> DatasetSplits:
    """Build datasets of random tokens, without files."""
    train, valid, test = (
        samples.mock(number, split) if number > 0 else None for split, number in enumerate(num_samples)
    )
    return DatasetSplits(train, valid, test)


def build_from_corpora(
    sources: Sources,
    opened: Mapping[str, IndexedDataset],
    num_samples: tuple[int, int, int],
    options: BuildOptions,
) -> DatasetSplits:
    """Order the samples of each split.

    Each dataset holds at least the requested samples, from as many epochs as needed. The result only depends
    on the arguments, so every rank builds the same. It logs how much of each corpus training uses.

    Args:
        sources: blends of each split.
        opened: the corpora by prefix; see `open_corpora`.
        num_samples: number of samples requested from train, valid and test.

    Raises:
        UserError: a split is too small for one sample, there is nothing to train on, or a corpus does not
            fit the samples.
    """
    for corpus in opened.values():
        options.samples.check(corpus)
    requested = dict(zip(SPLIT_NAMES, num_samples, strict=True))
    prefixes = [source.prefix for blend in sources["train"] for source in blend.sources]
    unshuffled = [prefix for prefix in prefixes if not opened[prefix].is_shuffled]
    if options.samples.are_windows and requested["train"] and unshuffled:
        log.warning(
            "samples are windows of %s, with neighbouring documents together: shuffle the documents before "
            "you preprocess them, or prepare the corpus with the setting shuffle",
            few(unshuffled),
        )
    remote = [prefix for prefix, corpus in opened.items() if corpus.is_remote]
    unchecked = [each for each in remote if not opened[each].has_checksums(options.samples.are_windows)]
    if unchecked:
        log.warning(
            "%s: what is read from object storage has no checksums, so a bit that flips on the way changes a "
            "token; list the shards again with %s --list",
            few(unchecked),
            command_name("merge-datasets"),
        )
    _warn_of_overlap(sources, {split for split in SPLIT_NAMES if requested[split]})
    own: dict[str, Dataset | None] = dict.fromkeys(SPLIT_NAMES)
    named = []
    for split in SPLIT_NAMES:
        for blend in sources[split]:
            dataset = _BlendBuild(split, blend, opened, requested[split], options).build()
            if split == "train" or not blend.name:
                own[split] = dataset
            elif dataset is not None:
                named.append(NamedDataset(split, blend.name, dataset))
    if own["train"] is None and requested["train"] > 0:
        given_by = sources["train"][0].given_by if sources["train"] else "--split"
        raise UserError(
            f"{given_by} leaves no sequence of {' '.join(prefixes)} to train on: give train a larger share"
        )
    return DatasetSplits(own["train"], own["valid"], own["test"], tuple(named))


def open_corpora(
    sources: Sources, cache_bytes: int = CACHE_BYTES, checks_index: bool = True
) -> dict[str, IndexedDataset]:
    """Open and check every corpus once, and return them by prefix.

    Args:
        cache_bytes: limit of the cache of files in object storage.
        checks_index: see `IndexedDataset`.

    Raises:
        UserError: a file is missing or damaged, or a blend has too many corpora.
    """
    blends = [blend for split in SPLIT_NAMES for blend in sources[split]]
    for blend in blends:
        if len(blend.sources) > MAX_DATASETS:
            raise UserError(
                f"--data-path names {len(blend.sources)} datasets, and at most {MAX_DATASETS} can be "
                f"blended: merge some with {command_name('merge-datasets')}"
            )
    prefixes = dict.fromkeys(source.prefix for blend in blends for source in blend.sources)
    return {prefix: open_dataset(prefix, cache_bytes, checks_index) for prefix in prefixes}


def _warn_of_overlap(sources: Sources, used: set[str]) -> None:
    parts = {
        split: [source for blend in sources[split] for source in blend.sources] if split in used else []
        for split in SPLIT_NAMES
    }
    for split in SPLIT_NAMES[1:]:
        shared = {
            one.prefix
            for one in parts["train"]
            for other in parts[split]
            if one.prefix == other.prefix and max(one.begin, other.begin) < min(one.end, other.end)
        }
        for prefix in sorted(shared):
            log.warning("%s: the %s split evaluates on text that is also trained on", prefix, split)


@dataclass(frozen=True)
class _BlendBuild:
    """Builder of one dataset of a split."""

    split: str
    blend: Blend
    opened: Mapping[str, IndexedDataset]
    num_samples: int
    options: BuildOptions

    def build(self) -> Dataset | None:
        if self.num_samples == 0:
            return None
        kept = self._sources_with_sequences()
        if not kept:
            return None
        self._check_batch(kept)
        if self.blend.phases is not None and self.split == "train":
            return self._mixture(self.blend.phases)
        if len(self.blend.sources) == 1 and self.blend.weights is None:
            self._log_coverage([0], [1.0], [self.num_samples])
            return self._dataset(0, None if self._is_read_once or self._is_whole else self.num_samples)
        if self.blend.weights is None:
            return self._blend_by_size(kept)
        if self._is_whole:
            raise UserError(
                f"--full-validation reads each sample of {len(kept)} corpora once, whatever their weights: "
                "pass --multiple-validation-sets, or remove the weights"
            )
        return self._blend_by_weight(kept, [self.blend.weights[i] for i in kept])

    def _check_batch(self, kept: list[int]) -> None:
        """Refuse to train on a corpus so small that one batch would hold a sample twice."""
        num_tokens = sum(self._num_tokens(i) for i in kept)
        num_samples = num_tokens // self.options.samples.seq_length
        if self.split == "train" and 0 < num_samples < self.options.batch_size:
            raise UserError(
                f"there are {num_samples} samples of {self.options.samples.seq_length} tokens to train on, "
                f"fewer than one batch of {self.options.batch_size}: use more text or a smaller batch "
                "(--global-batch-size)"
            )

    @property
    def _is_read_once(self) -> bool:
        return self.split != "train" and self.options.samples.are_whole_documents

    @property
    def _is_whole(self) -> bool:
        return self.split == "valid" and self.options.full_validation

    def _sequences(self, i: int) -> range:
        source = self.blend.sources[i]
        corpus = self.opened[source.prefix]
        if not self.options.samples.are_of_documents:
            return source.sequences(len(corpus))
        documents = source.sequences(corpus.num_documents)
        return range(*(int(corpus.document_index[i]) for i in (documents.start, documents.stop)))

    def _sources_with_sequences(self) -> list[int]:
        """Return the sources that have a part in this split; training needs all of them."""
        indices = range(len(self.blend.sources))
        empty = [i for i in indices if not self._sequences(i)]
        for i in empty if len(indices) > 1 or self.blend.weights is not None else []:
            source = self.opened[self.blend.sources[i].prefix]
            fault = (
                f"{self.blend.given_by} leaves none of the {len(source)} sequences of {source.prefix} "
                f"to the {self.blend.name or self.split} split"
            )
            if self.split == "train":
                raise UserError(f"{fault}: give train a larger share, or remove this dataset from the blend")
            if len(empty) < len(indices):
                log.warning("%s; the others keep their proportions in the blend", fault)
        return [i for i in indices if i not in empty]

    def _mixture(self, phases: DataPhases) -> MixtureDataset:
        """Mix the sources as the phases say, and log what each source gives to each phase."""
        seq_length = self.options.samples.seq_length
        tokens = [self._num_tokens(i) for i in range(len(phases.sources))]
        sizes = [max(1, (number - 1) // seq_length) for number in tokens]
        plan = MixturePlan.of(phases, sizes, self.num_samples, seq_length, self.options.consumed_after)
        prefix = self.blend.sources[0].prefix
        mixture = MixtureDataset(plan, self.num_samples, self._dataset, self.options.cache, prefix)
        counts = mixture.drawn.sum(0).tolist()
        log_coverage(
            [
                Coverage.of(f"{source.name} ({source.path})", number, seq_length, count, None)
                for source, number, count in zip(phases.sources, tokens, counts, strict=True)
            ]
        )
        for line in mixture_lines(plan, mixture.drawn, seq_length):
            log.info("%s", line)
        for name, at in zip(plan.names, mixture.exhausted.tolist(), strict=True):
            if at >= 0:
                log.warning("source %s runs out at sample %d: the others go on without it", name, at)
        return mixture

    def _blend_by_weight(self, kept: list[int], weights: Sequence[float]) -> Dataset:
        shares = normalized(weights)
        built = [num_samples_to_build(self.num_samples, share) for share in shares]
        self._log_coverage(kept, shares, built)
        datasets = [self._dataset(i, number) for i, number in zip(kept, built, strict=True)]
        return self._blend(datasets, weights, self.num_samples)

    def _blend(self, datasets: Sequence[Dataset], weights: Sequence[float], num_samples: int) -> Dataset:
        prefix, name = self.blend.sources[0].prefix, self.blend.name or self.split
        return BlendedDataset(datasets, weights, num_samples, self.options.cache, prefix, name)

    def _blend_by_size(self, kept: list[int]) -> Dataset:
        """Weight each dataset by its size. Datasets only repeat if all of them together are too small."""
        if self.split == "train":
            log.info(
                "%d datasets without weights are blended by their number of %s (--blend-by)",
                len(kept),
                self.options.blend_by,
            )
        if self.options.blend_by == "documents" and not self._is_whole:
            return self._blend_by_weight(kept, [len(self._sequences(i)) for i in kept])
        one_epoch = [self._dataset(i, None) for i in kept]
        weights = [len(dataset) for dataset in one_epoch]
        if self._is_whole:
            return self._blend(one_epoch, weights, sum(weights))
        if self.num_samples <= sum(weights):
            self._log_coverage(kept, normalized(weights), [None] * len(kept))
            return self._blend(one_epoch, weights, self.num_samples)
        return self._blend_by_weight(kept, weights)

    def _log_coverage(self, kept: list[int], shares: Sequence[float], built: Sequence[int | None]) -> None:
        if self.split != "train" or self.options.samples.are_whole_documents:
            return
        log_coverage(
            [
                Coverage.of(
                    self.blend.sources[i].prefix,
                    self._num_tokens(i),
                    self.options.samples.seq_length,
                    self.num_samples * share,
                    None if self.options.samples.are_windows else number,  # its epochs are shuffled apart
                )
                for i, share, number in zip(kept, shares, built, strict=True)
            ]
        )

    def _num_tokens(self, i: int) -> int:
        corpus = self.opened[self.blend.sources[i].prefix]
        return self.options.samples.num_tokens(corpus, self._sequences(i))

    def _dataset(self, i: int, num_samples: int | None) -> Dataset:
        dataset = self.options.samples.dataset(
            self.opened[self.blend.sources[i].prefix],
            self._sequences(i),
            None if self._is_read_once else num_samples,
            self.blend.name or self.split,
            self.options.cache,
        )
        return OnePass(dataset, num_samples or len(dataset)) if self._is_read_once else dataset
