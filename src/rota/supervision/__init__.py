"""Loops that are retried and restarted after errors, and the tasks and stacks of a process."""
