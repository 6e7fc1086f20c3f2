"""Pipeline parallelism: one exported graph cut into stages that torch's schedules run with compiled programs."""
