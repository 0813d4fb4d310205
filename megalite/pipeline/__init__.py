"""Pipeline parallelism: schedules as data, a simulator that checks them, their messages, and an executor."""
