-- Return whether the limit or hold of a key was changed or removed since an instant, according to the audit.
--   $1 key    text
--   $2 since  timestamptz
--   -> removed bool
-- index: prune_audit_idx (0001)
select exists (
    select
    from rota.audit
    where audit.done_at >= $2::timestamptz
      and audit.target = 'limit ' || $1
) as removed
