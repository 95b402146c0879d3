-- Send one dead letter back to the live jobs, with another payload if one is given.
--   $1 job_id   int8
--   $2 payload  text  JSON
--   $3 note     text
--   -> redriven text?
select rota.redrive($1, $2::text::jsonb, $3)::text as redriven
