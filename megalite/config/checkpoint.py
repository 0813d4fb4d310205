"""Where a run is saved and resumed from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megalite.config.flags import flags

NonPersistentType = Literal["local"]


@dataclass(frozen=True)
class CheckpointConfig:
    """Folders of checkpoints, and how often to write one."""

    save: str | None = None
    """Folder to save checkpoints to, at the end of the run and at each interval."""
    load: str | None = None
    """Folder whose last checkpoint the run resumes from."""
    load_iteration: int | None = field(default=None, metadata=flags("--ckpt-step"))
    """Iteration of the checkpoint to load; by default the one that the folder's `latest` names."""
    save_interval: int | None = None
    """Iterations between checkpoints; by default only the end is saved."""
    async_save: bool = False
    """Save in the background, from a copy in host memory, while training goes on; the last save waits."""
    non_persistent_save_interval: int | None = None
    """Iterations between saves that each rank keeps for itself, for a restart on the same nodes."""
    non_persistent_ckpt_type: NonPersistentType | None = None
    """Kind of those saves: local, the default, is each rank's own in a folder of its node."""
    non_persistent_local_ckpt_dir: str | None = None
    """Folder of those saves on each node's disk or in its memory, such as /dev/shm/megalite."""
    exit_on_save_failure: bool = False
    """End the run with status 1 where a save fails; by default it goes on, and the next save tries again."""
    keep_last: int | None = None
    """Newest checkpoints to keep: once a new one is whole, older ones are deleted. By default all stay."""
    keep_every: int | None = field(default=None, metadata=flags("--save-retain-interval"))
    """Keep checkpoints of iterations that this divides; of the others --keep-last, or the newest alone."""
    finetune: bool = False
    """Take the weights alone from --load: the run starts at iteration 0, with its own data and schedule."""
    load_optim: bool = True
    """Load the optimizer's state too; --no-load-optim starts it anew, with the loss scale."""
    save_optim: bool = True
    """Save the optimizer's state too; --no-save-optim makes checkpoints that no run goes on from exactly."""
    use_checkpoint_args: bool = False
    """Take the fields of the model that are not given from the checkpoint in --load."""
    override_opt_param_scheduler: bool = False
    """Go on with the given schedule of learning rate and weight decay where the checkpoint has another."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Go on with the checkpoint's schedule of learning rate and weight decay, whatever is given."""
    allow_data_change: bool = False
    """Resume on other training data than the checkpoint's: samples are then read in the new data's order."""
    allow_settings_change: bool = False
    """Resume with other settings than the checkpoint's: Adam's, clipping, dropout, precision."""

    @property
    def loads_own(self) -> bool:
        """Whether --load and --save name one folder, however it is spelled: `runs/a` is also `runs/a/`."""
        return None not in (self.load, self.save) and Path(self.load or "") == Path(self.save or "")
