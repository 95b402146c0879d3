"""The daemon: build its parts, supervise them, drain."""
