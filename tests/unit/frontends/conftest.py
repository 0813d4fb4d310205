from tests.unit.config.conftest import one_rank, problems  # noqa: F401
