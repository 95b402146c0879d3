-- Return the installation, server and timeline to which the connection leads.
--   -> installation_id text?, read_only bool?, system_identifier int8?, database_oid int8?, timeline int8?, started_at timestamptz?
select
    meta.installation_id::text as installation_id,
    pg_is_in_recovery() or current_setting('transaction_read_only')::bool as read_only,
    here.system_identifier,
    here.database_oid,
    here.timeline,
    pg_postmaster_start_time() as started_at
from rota.meta as meta
cross join rota.current_server() as here
