"""Loops that survive errors, and the tasks and stacks of a process."""
