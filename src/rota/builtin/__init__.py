"""Built-in handlers. All are off until the configuration turns them on, except for the samples of `rota dev`."""
