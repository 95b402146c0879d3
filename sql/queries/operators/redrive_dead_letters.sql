-- Redrive up to $6 dead letters, oldest job first.
--   $1 handler               text
--   $2 queue                 text
--   $3 reason                text
--   $4 error_kind            text
--   $5 before                timestamptz
--   $6 limit                 int4
--   $7 spread                interval     spread their run_at evenly over this time; null: all at once
--   $8 include_at_most_once  bool
--   $9 note                  text
--   -> redriven int8?, left_out int8?
select counts.redriven, counts.left_out
from rota.redrive_many($1, $2, $3, $4, $5, $6, $7, $8, $9) as counts
