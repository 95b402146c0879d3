-- Insert or update a daemon's handlers with their defaults. Locked rows are skipped and not counted: try again.
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
-- Lock first, and skip locked rows: otherwise a daemon waits behind an open transaction that pauses a handler, and is taken for
-- dead. Inserts are ordered by name: two daemons that start at the same time would deadlock otherwise.
with input as materialized (
    select *
    from unnest($3::text[], $4::text[], $5::int4[], $6::interval[], $7::interval[], $8::interval[], $9::text[])
        as input (handler, queue, max_attempts, backoff_base, backoff_cap, timeout, delivery)
),
locked_handlers as materialized (
    select handler.handler
    from input
    cross join lateral (
        select handlers.handler
        from rota.handlers
        where handlers.handler = input.handler
        for update skip locked
    ) as handler
),
updated_handlers as (
    update rota.handlers as handler
    set app = $1,
        release = $2,
        queue = input.queue,
        max_attempts = input.max_attempts,
        backoff_base = input.backoff_base,
        backoff_cap = input.backoff_cap,
        timeout = input.timeout,
        delivery = input.delivery,
        seen_at = now()
    from input
    where handler.handler = any (array(select locked_handlers.handler from locked_handlers))
      and input.handler = handler.handler
    returning 1
),
inserted_handlers as (
    insert into rota.handlers (
        app, release, handler, queue, max_attempts, backoff_base, backoff_cap, timeout, delivery, seen_at
    )
    select
        $1, $2, input.handler, input.queue, input.max_attempts, input.backoff_base, input.backoff_cap, input.timeout,
        input.delivery, now()
    from input
    where (select true from rota.handlers where handlers.handler = input.handler) is null
    order by input.handler
    on conflict (handler) do nothing
    returning 1
)
select (select count(*) from updated_handlers) + (select count(*) from inserted_handlers) as written
