-- List the handlers that daemons have ever registered, for the spelling of one that none has.
--   -> handler text
select handler.handler
from rota.handlers as handler
where handler.seen_at is not null
order by handler.handler
