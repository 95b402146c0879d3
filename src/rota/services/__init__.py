"""Background work: a name, an interval, and `run_once`. The loop exists once, in `rota.supervision.loop`."""
