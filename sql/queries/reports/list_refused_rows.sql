-- List the rows on which the database refuses operations of living daemons, the longest refused first.
--   $1 job_id  int8  only this job; null: all rows
--   -> doing text?, what text?, id int8?, kind text?, age interval?, node text?
--   what  job or schedule
--   id    job_id or schedule_id
select
    row.doing, row.what, row.id, min(row.kind) as kind, make_interval(secs => max(row.seconds)) as age,
    min(node.host || ':' || node.pid) as node
from rota.nodes as node
cross join lateral jsonb_to_recordset(
    case jsonb_typeof(node.refused) when 'array' then node.refused else '[]'::jsonb end
) as row (doing text, what text, id int8, kind text, seconds float8)
where node.seen_at > now() - interval '15 seconds'
  and ($1::int8 is null or (row.what = 'job' and row.id = $1))
group by row.doing, row.what, row.id
order by age desc, row.what, row.id
limit 100
