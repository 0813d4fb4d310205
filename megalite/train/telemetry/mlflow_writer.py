"""Write metrics to MLflow, under the names of the other dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from megalite.config import LoggingConfig
from megalite.errors import UserError
from megalite.train.telemetry.dashboards import GuardedCalls, ScalarWriter

_PARAMS_PER_CALL = 100  # MLflow's limit


class MlflowWriter(ScalarWriter):
    """Writer to a run of MLflow, with the config as parameters such as ``model.num_layers``.

    MLflow sends them from a thread of its own, so that a slow server does not slow the run.

    Args:
        config_text: the run's config as YAML.

    Raises:
        UserError: mlflow is not installed, or its server refuses the run.
    """

    def __init__(self, config: LoggingConfig, world_size: int, config_text: str) -> None:
        super().__init__(config, world_size)
        output = f"--mlflow-experiment {config.mlflow_experiment}"
        try:
            import mlflow  # imported here because it is an optional package that only one rank needs
        except ImportError:
            raise UserError(
                f"{output} needs the package mlflow, which is not installed: "
                "pip install mlflow-skinny, or omit the flag"
            ) from None
        self._mlflow: Any = mlflow
        self._send = GuardedCalls(output)
        try:
            mlflow.set_experiment(config.mlflow_experiment)
            mlflow.start_run()
        except mlflow.exceptions.MlflowException as error:
            problem = str(error).splitlines()[0]
            raise UserError(f"{output} cannot be written at MLFLOW_TRACKING_URI: {problem}") from None
        groups = yaml.safe_load(config_text)
        params = [(f"{group}.{name}", value) for group, of in groups.items() for name, value in of.items()]
        for first in range(0, len(params), _PARAMS_PER_CALL):
            part = dict(params[first : first + _PARAMS_PER_CALL])
            self._send(lambda part=part: mlflow.log_params(part, synchronous=False))  # type: ignore[misc]

    def scalars(self, iteration: int, scalars: Mapping[str, float]) -> None:
        self._send(lambda: self._mlflow.log_metrics(dict(scalars), step=iteration, synchronous=False))

    def close(self, *, has_failed: bool = False) -> None:
        self._send(self._mlflow.flush_async_logging)
        self._send(lambda: self._mlflow.end_run("FAILED" if has_failed else "FINISHED"))
