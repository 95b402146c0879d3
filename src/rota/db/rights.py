"""What keeps a daemon from seeing or writing rota's tables although it can connect, each with its cause and its cure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rota.db.sql import SQL

if TYPE_CHECKING:
    from rota.db.pool import Connection

Kind = Literal["row_security", "trigger", "replica_role", "replica_identity", "privilege"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RightsFault:
    """One fault: `object` is a table or a login, `detail` depends on the kind, see sql/queries/examine_rights.sql."""

    kind: Kind
    object: str
    detail: str

    @property
    def cause(self) -> str:
        """What is wrong, in a sentence that names the object."""
        match self.kind:
            case "row_security":
                return f"row-level security is enabled on {self.object} and makes the statements of the login {self.detail} fail"
            case "trigger":
                return f"the trigger {self.detail} on {self.object} is disabled"
            case "replica_role":
                return (
                    f"sessions of {self.object} run with session_replication_role = {self.detail}, so no trigger fires"
                )
            case "replica_identity":
                return f"{self.object} is in the publication {self.detail} without a replica identity, so updates and deletes fail"
            case "privilege":
                return f"this login lacks {self.detail} on {self.object}"

    @property
    def cure(self) -> str:
        """How to mend it."""
        match self.kind:
            case "row_security":
                return (
                    f"alter table {self.object} disable row level security; or, if its policies are for clients, "
                    f"alter role {self.detail} bypassrls"
                )
            case "trigger":
                return f"alter table {self.object} enable trigger {self.detail}"
            case "replica_role":
                return (
                    f"alter role {self.object} reset session_replication_role, also in alter database … and in the URL"
                )
            case "replica_identity":
                return f"alter table {self.object} replica identity default"
            case "privilege":
                return "rota migrate --roles, and grant rota_daemon to this login"

    @property
    def stops_daemons(self) -> bool:
        """Whether a daemon can't work at all."""
        return self.kind in {"row_security", "replica_role", "replica_identity"}


async def examine_rights(db: Connection) -> list[RightsFault]:
    """Return what is wrong for daemons in general, and with the privileges of the login of this connection."""
    return [RightsFault(**row) for row in await db.fetch(SQL["examine_rights"])]
