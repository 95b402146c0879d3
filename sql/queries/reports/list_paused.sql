-- List the paused queues (*: all queues) and handlers.
--   -> kind text?, name text?, reason text?, paused_by text?, paused_at timestamptz?
select 'queue' as kind, queue.queue as name, queue.pause_reason as reason, queue.paused_by, queue.paused_at
from rota.queues as queue
where queue.paused
union all
select 'handler', handler.handler, handler.pause_reason, handler.paused_by, handler.paused_at
from rota.handlers as handler
where handler.paused
order by kind desc, name
