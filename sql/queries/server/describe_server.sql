-- Return the properties of the server that decide how a daemon connects to it.
--   -> version int4?, read_only bool?, pid int4?, synchronous_commit text?, encoding text?
select
    current_setting('server_version_num')::int4 as version,
    pg_is_in_recovery() or current_setting('transaction_read_only')::bool as read_only,
    pg_backend_pid() as pid,
    current_setting('synchronous_commit') as synchronous_commit,
    current_setting('server_encoding') as encoding
