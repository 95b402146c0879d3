"""An embedded PostgreSQL: `server` starts and stops it, `places` finds its folders, `processes` its running processes."""

from rota.embedded.places import ServerUser, default_data_dir, find_bindir
from rota.embedded.server import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "ServerUser", "default_data_dir", "find_bindir"]
