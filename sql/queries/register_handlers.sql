-- Write down the handlers of a daemon with their defaults.
--   $1 app           text
--   $2 release       text
--   $3 handlers      text[]
--   $4 queues        text[]
--   $5 max_attempts  int4[]
--   $6 backoff_base  interval[]
--   $7 backoff_cap   interval[]
--   $8 timeouts      interval[]
--   $9 deliveries    text[]
-- In the order of their names: two daemons that start at once would deadlock otherwise.
insert into rota.handlers as handler (
    app, release, handler, queue, max_attempts, backoff_base, backoff_cap, timeout, delivery, seen_at
)
select
    $1, $2, given.handler, given.queue, given.max_attempts, given.backoff_base, given.backoff_cap, given.timeout,
    given.delivery, now()
from unnest($3::text[], $4::text[], $5::int4[], $6::interval[], $7::interval[], $8::interval[], $9::text[])
    as given (handler, queue, max_attempts, backoff_base, backoff_cap, timeout, delivery)
order by given.handler
on conflict (handler) do update
set app = excluded.app,
    release = excluded.release,
    queue = excluded.queue,
    max_attempts = excluded.max_attempts,
    backoff_base = excluded.backoff_base,
    backoff_cap = excluded.backoff_cap,
    timeout = excluded.timeout,
    delivery = excluded.delivery,
    seen_at = excluded.seen_at
