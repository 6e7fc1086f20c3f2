"""Python's object model: functions, classes, instances and modules, with the look-up of their attributes."""
