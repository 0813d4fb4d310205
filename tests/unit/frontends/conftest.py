from tests.unit.config.conftest import no_launcher, problems  # noqa: F401
