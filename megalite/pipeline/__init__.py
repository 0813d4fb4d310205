"""Pipeline parallelism: schedules as data, a simulator that checks them, messages and an executor."""
