"""The handlers that rota brings along: off until the configuration turns them on, but for those of a first look."""
