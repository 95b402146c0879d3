-- Move one dead letter to the ledger, with the outcome discarded.
--   $1 job_id  int8
--   $2 note    text
--   -> discarded text?
select rota.discard($1, $2)::text as discarded
