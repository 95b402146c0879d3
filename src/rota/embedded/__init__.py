"""A PostgreSQL of rota's own: `server` starts and stops it, `places` knows where all of it lies, `processes` who lives there."""

from rota.embedded.places import ServerUser, default_data_dir, find_bindir
from rota.embedded.server import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "ServerUser", "default_data_dir", "find_bindir"]
