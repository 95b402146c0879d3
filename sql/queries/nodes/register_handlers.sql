-- Write down the handlers of a daemon with their defaults. A row that somebody has locked stays as it is: try again.
--   $1 app           text
--   $2 release       text
--   $3 handlers      text[]
--   $4 queues        text[]
--   $5 max_attempts  int4[]
--   $6 backoff_base  interval[]
--   $7 backoff_cap   interval[]
--   $8 timeouts      interval[]
--   $9 deliveries    text[]
--   -> written int8?
-- index: handlers_pkey (0001)
-- Without the lock first, a daemon would wait for whoever pauses one of them in an open transaction, and be taken for dead.
-- New ones in the order of their names: two daemons that start at once would deadlock otherwise.
with given as materialized (
    select *
    from unnest($3::text[], $4::text[], $5::int4[], $6::interval[], $7::interval[], $8::interval[], $9::text[])
        as given (handler, queue, max_attempts, backoff_base, backoff_cap, timeout, delivery)
),
held as materialized (
    select handler.handler
    from given
    cross join lateral (
        select handlers.handler
        from rota.handlers
        where handlers.handler = given.handler
        for update skip locked
    ) as handler
),
updated as (
    update rota.handlers as handler
    set app = $1,
        release = $2,
        queue = given.queue,
        max_attempts = given.max_attempts,
        backoff_base = given.backoff_base,
        backoff_cap = given.backoff_cap,
        timeout = given.timeout,
        delivery = given.delivery,
        seen_at = now()
    from given
    where handler.handler = any (array(select held.handler from held))
      and given.handler = handler.handler
    returning 1
),
inserted as (
    insert into rota.handlers (
        app, release, handler, queue, max_attempts, backoff_base, backoff_cap, timeout, delivery, seen_at
    )
    select
        $1, $2, given.handler, given.queue, given.max_attempts, given.backoff_base, given.backoff_cap, given.timeout,
        given.delivery, now()
    from given
    where (select true from rota.handlers where handlers.handler = given.handler) is null
    order by given.handler
    on conflict (handler) do nothing
    returning 1
)
select (select count(*) from updated) + (select count(*) from inserted) as written
