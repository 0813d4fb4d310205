"""The configuration of saving and loading checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megalite.config.option import (
    FOLDER_OR_URL,
    LOCAL_PATH,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    AnyOf,
    Conflicts,
    OnResume,
    Range,
    Setting,
    option,
)
from megalite.utils.object_store import is_object_url, local_folder

NonPersistentType = Literal["local"]


_SAVES_EARLIER = AnyOf(
    (
        "save_interval",
        "save_interval_minutes",
        "non_persistent_save_interval",
        "non_persistent_save_interval_minutes",
    ),
    "the run saves only at its end: pass --save-interval",
)
_SAVES_LOCALLY = AnyOf(
    ("non_persistent_save_interval", "non_persistent_save_interval_minutes"),
    "--non-persistent-save-interval is not set",
)
_LOADS_ALL = (Setting("load"), Setting("finetune", (False,), "--finetune loads only the weights"))
_LOADS_OPTIMIZER = (*_LOADS_ALL, Setting("load_optim"))
_LAYOUT_AT = Range(
    lambda entry: re.fullmatch(r"[1-9][0-9]*:.+", entry),
    "an iteration and the name of a layout, such as 1000:tp2dp4",
    "cannot be read: write",
)


@dataclass(frozen=True)
class CheckpointConfig:
    """Folders and times of saves, what a run loads, and when its state moves to another layout."""

    default_on_resume: ClassVar[OnResume] = OnResume.FREE

    save: str | None = option(None, allowed=FOLDER_OR_URL)
    """Folder to save checkpoints to, at each --save-interval and at the end; or s3://BUCKET/FOLDER (or gs://,
    az://), to which ranks upload files while training goes on."""
    load: str | None = option(None, allowed=FOLDER_OR_URL)
    """Folder, or s3://BUCKET/FOLDER (also gs://, az://), to load the latest checkpoint from; the run resumes
    from it."""
    save_stage: str | None = option(
        None,
        differs_between_ranks=True,
        allowed=LOCAL_PATH,
        only_with=AnyOf(("save", "load"), "neither --save nor --load is a URL", is_object_url),
    )
    """Folder on each node's disk for files on their way to and from object storage. By default the folder of
    temporary files."""
    exit_upload_seconds: float | None = option(
        None, allowed=NOT_NEGATIVE, only_with=AnyOf(("save",), "--save is not a URL", is_object_url)
    )
    """Seconds that the end of the run, also by a signal, waits for uploads. The next start then uploads the
    rest. By default it waits without limit."""
    load_iteration: int | None = option(None, "--ckpt-step", allowed=NOT_NEGATIVE, only_with="load")
    """Iteration of the checkpoint to load. By default the latest one."""
    save_interval: int | None = option(None, "--persistent-save-interval", allowed=POSITIVE, only_with="save")
    """Iterations between checkpoints. By default a run saves only at its end."""
    save_interval_minutes: float | None = option(None, allowed=POSITIVE, only_with="save")
    """Minutes from one checkpoint to the next. All ranks save after the same iteration. With --save-interval,
    whichever comes first."""
    async_save: bool = option(False, only_with=(Setting("save"), _SAVES_EARLIER))
    """Save in the background from a copy in host memory, while training continues."""
    non_persistent_save_interval: int | None = option(None, allowed=POSITIVE)
    """Iterations between non-persistent saves. Each rank saves its part of the state on its node, so that a
    restarted job loses less."""
    non_persistent_save_interval_minutes: float | None = option(None, allowed=POSITIVE)
    """Minutes from one save, of either kind, to the next non-persistent one. With an interval of iterations,
    whichever comes first."""
    non_persistent_ckpt_type: NonPersistentType | None = option(None, only_with=_SAVES_LOCALLY)
    """Type of non-persistent saves. With local, each rank saves its part to a folder on its node."""
    non_persistent_local_ckpt_dir: str | None = option(
        None, differs_between_ranks=True, only_with=_SAVES_LOCALLY, allowed=LOCAL_PATH
    )
    """Folder for non-persistent saves, on each node's disk or in its memory, for example
    /dev/shm/megalite."""
    peer_copies: int = option(0, allowed=NOT_NEGATIVE, only_with=_SAVES_LOCALLY)
    """Copies of each rank's part of a non-persistent save, each on another node. A job can restart from it
    after the loss of this many nodes."""
    peer_domains: str | None = option(None, allowed=LOCAL_PATH, only_with="peer_copies")
    """File with a line for each host: its name, and the name of its rack or switch. A copy of a part is then
    in another one. By default it is on a node with a distant number."""
    exit_on_save_failure: bool = option(False, only_with="save")
    """Exit with status 1 if a save fails. By default the run continues, and the next save tries again."""
    keep_last: int | None = option(None, allowed=SIZE, only_with="save")
    """Number of checkpoints to keep. Older ones are deleted after each save, but not the last good one of
    --audit-interval. By default all are kept."""
    keep_every: int | None = option(None, "--save-retain-interval", allowed=POSITIVE, only_with="save")
    """Keep every checkpoint whose iteration is a multiple of this number. Of the others, keep the last
    --keep-last (by default 1)."""
    finetune: bool = option(False, only_with="load")
    """Load only the weights; the run starts at iteration 0 with its own data and schedules."""
    load_optim: bool = option(True, only_with=_LOADS_ALL)
    """Load the optimizer state and the loss scale; --no-load-optim resets them."""
    save_optim: bool = option(True, only_with="save")
    """Save the optimizer state. Without it, a run cannot resume exactly."""
    use_checkpoint_args: bool = False
    """Take the model's options from the checkpoint in --load; flags override them."""
    override_opt_param_scheduler: bool = option(False, "--override-lr-scheduler", only_with=_LOADS_OPTIMIZER)
    """Resume with the learning-rate and weight-decay schedules from the flags instead of the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = option(
        False, "--use-checkpoint-lr-scheduler", only_with=_LOADS_OPTIMIZER
    )
    """Resume with the checkpoint's learning-rate and weight-decay schedules, and ignore the flags'."""
    allow_data_change: bool = option(False, only_with=_LOADS_ALL)
    """Allow the training data to differ from the checkpoint's. Samples are read in the new data's order."""
    allow_settings_change: bool = option(False, only_with=_LOADS_OPTIMIZER)
    """Allow settings of Adam, clipping, dropout and precision that differ from the checkpoint's."""
    inprocess_restart: bool = option(False, only_with="save")
    """Go on without processes that are lost: the others, and spares, form a new group without ending, and
    resume from the latest save. The launcher must let them live."""
    spare_nodes: int = option(0, allowed=NOT_NEGATIVE, only_with="inprocess_restart")
    """Nodes of the launch, of --nproc-per-node processes each, that wait to replace lost ones. The layout is
    that of the other nodes."""
    join_run: bool = option(False, only_with="inprocess_restart", differs_between_ranks=True)
    """If a run trains in --save, join it after an iteration, as nodes that were repaired or are new;
    otherwise start a run."""
    layout_at: tuple[str, ...] | None = option(None, allowed=_LAYOUT_AT)
    """Change the layout during the run, in memory: ITERATION:LAYOUT ... with the names of megalite verify, as
    in 1000:tp2dp4 5000:dp8+zero3."""
    layout_file: str | None = option(None, allowed=LOCAL_PATH)
    """File that changes the layout during the run, in memory. Once it names a layout, as tp2dp4, the run
    takes it after the iteration, and deletes the file."""

    conflicts: ClassVar[Conflicts] = {
        ("layout_at", "layout_file"): {
            ("dry_run", "verify_layouts"): ", which trains in one layout at a time: remove one",
            Setting("tp_comm_overlap_method", ("symmetric_memory",)): (
                ", whose memory on the GPU torch does not free: pass --tp-comm-overlap-method chunks"
            ),
            Setting("global_batch_size", (None,)): (
                ", whose default depends on the layout: pass the samples of an optimizer step"
            ),
        },
        "inprocess_restart": {
            "layout_at": ", which names layouts of all ranks: remove one",
            Setting("data_parallel_shard_degree", (0,)): (
                ", whose groups depend on the ranks of each node: pass --data-parallel-shard-degree"
            ),
            Setting("global_batch_size", (None,)): (
                ", whose default depends on the layout: pass the samples of an optimizer step"
            ),
        },
        "override_opt_param_scheduler": {
            "use_checkpoint_opt_param_scheduler": (
                ": one resumes with the flags' schedule, the other with the checkpoint's; remove one"
            ),
        },
        "use_checkpoint_args": {
            Setting("load", (None,)): ", from which it reads the model: pass it, or remove both",
        },
        ("non_persistent_save_interval", "non_persistent_save_interval_minutes"): {
            Setting("non_persistent_local_ckpt_dir", (None,)): (
                ": pass a folder on each node's disk or in its memory, for example /dev/shm/megalite"
            ),
            Setting("save", (None,)): (
                ": pass the folder of persistent checkpoints, which the run falls back on"
            ),
        },
    }

    @property
    def saves_at_intervals(self) -> bool:
        """Return whether checkpoints are saved before the end of the run."""
        return self.save_interval is not None or self.save_interval_minutes is not None

    @property
    def saves_locally(self) -> bool:
        """Return whether there are non-persistent saves."""
        return (
            self.non_persistent_save_interval is not None
            or self.non_persistent_save_interval_minutes is not None
        )

    @property
    def run_folder(self) -> str | None:
        """Return the folder on this machine for the run's other files: --save, or a part of the stage."""
        return None if self.save is None else str(local_folder(self.save, self.save_stage))

    @property
    def loads_own(self) -> bool:
        """Return whether --load and --save name the same folder; `runs/a` and `runs/a/` do."""
        return None not in (self.load, self.save) and Path(self.load or "") == Path(self.save or "")
