-- Read the payload, checkpoint, meta and result of a job. Commands show them only on request.
--   $1 job_id  int8
--   -> payload text?, checkpoint text?, meta text?, result text?
-- index: jobs_pkey (0002), dead_letters_pkey, job_runs_job_id_idx (0003)
select job.payload::text as payload, job.checkpoint::text as checkpoint, job.meta::text as meta, null::text as result
from rota.jobs as job
where job.job_id = $1
union all
select letter.payload::text, letter.checkpoint::text, letter.meta::text, null
from rota.dead_letters as letter
where letter.job_id = $1
union all
select null, null, run.meta::text, run.result::text
from rota.job_runs as run
where run.job_id = $1
limit 1
