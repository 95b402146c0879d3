-- List all handlers that a daemon has ever registered, to suggest a name for an unknown one.
--   -> handler text
select handler.handler
from rota.handlers as handler
where handler.seen_at is not null
order by handler.handler
