"""Pipeline parallelism: layers to stages, schedules as data, a simulator that proves them, an executor."""
