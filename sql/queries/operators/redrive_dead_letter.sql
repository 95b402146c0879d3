-- Redrive one dead letter: make it a live job again.
--   $1 job_id   int8
--   $2 payload  text  JSON; null: unchanged
--   $3 note     text
--   -> redriven text?
select rota.redrive($1, $2::text::jsonb, $3)::text as redriven
