-- Move up to $6 dead letters to the ledger, with the outcome discarded.
--   $1 handler     text
--   $2 queue       text
--   $3 reason      text
--   $4 error_kind  text
--   $5 before      timestamptz
--   $6 limit       int4
--   $7 note        text
--   -> discarded int8?
select rota.discard_many($1, $2, $3, $4, $5, $6, $7) as discarded
