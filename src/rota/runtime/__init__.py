"""The process: its clock, its signals, its service manager."""
