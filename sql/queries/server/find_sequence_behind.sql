-- Find out whether the sequence of job_ids would give out ids that jobs have: after a restore of rows without sequences.
--   -> largest int8?
--   largest  the largest job_id, if the sequence is behind it; null: it is not, or this login may not read it
-- index: jobs_pkey (0002)
select case
    when has_sequence_privilege('rota.jobs_job_id_seq', 'USAGE, SELECT')
        and jobs.largest > coalesce(pg_sequence_last_value('rota.jobs_job_id_seq'::regclass), 0)
    then jobs.largest
end as largest
from (select max(job_id) as largest from rota.jobs) as jobs
