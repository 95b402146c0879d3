"""The process itself: clock, signals, forked children, init process and systemd."""
