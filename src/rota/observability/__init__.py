"""Logs, metrics and the health endpoints."""
