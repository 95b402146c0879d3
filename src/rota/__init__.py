"""rota: cron for a fleet, on PostgreSQL."""
