-- Pause a schedule. Returns whether it was running.
--   $1 name         text
--   $2 resume_at    timestamptz
--   $3 delay        interval  resume after this time, if resume_at is null
--   $4 cancel_live  bool
--   $5 reason       text
--   -> changed bool?
select rota.pause_schedule($1, $4, $5, coalesce($2::timestamptz, now() + $3::interval)) as changed
