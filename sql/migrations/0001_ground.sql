-- What everything else stands on: the installation, its names, its nodes, and who did what.

create schema rota;
revoke all on schema rota from public;

create table rota.migrations (
    version     integer primary key,
    name        text not null,
    checksum    text not null,
    applied_at  timestamptz not null default now()
);

-- One row: which installation this is, and which daemons may work on it.
create table rota.meta (
    only_row           boolean primary key default true constraint "there is one installation" check (only_row),
    installation_id    uuid    not null default gen_random_uuid(),
    schema_version     integer not null,
    oldest_compatible  integer not null
);

-- Fence tokens order the claims of the whole installation, not of one job.
create sequence rota.fence_tokens as bigint;

-- In plpgsql on purpose: the planner would put the body of an SQL function in place of its call, once for every CHECK and every
-- single-row INSERT, and take longer than the insert itself. Strict: a NULL (no value of one's own) isn't even a call.
create function rota.is_duration(value interval) returns boolean
    language plpgsql immutable strict parallel safe as $$
begin
    return value > interval '0'
       and value <= interval '366 days'
       and extract(year from value) = 0
       and extract(month from value) = 0;
end $$;

-- A name that a person can read in a log line: not empty, not endless, no line breaks or other control characters.
create function rota.is_name(value text) returns boolean
    language sql immutable parallel safe
    return length(value) between 1 and 200
       and value !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]';

-- Who is calling, also from inside a SECURITY DEFINER function, where current_user is the function's owner.
create function rota.caller() returns text
    language sql stable parallel safe
    return coalesce(nullif(current_setting('role', true), 'none'), session_user::text);

create table rota.handlers (
    handler       text primary key constraint "handler must be a name of 1 to 200 characters on one line" check (rota.is_name(handler)),
    app           text,
    release       text,
    queue         text constraint "queue must be a name of 1 to 200 characters on one line" check (rota.is_name(queue)),
    max_attempts  integer constraint "max_attempts must lie between 1 and 1000" check (max_attempts between 1 and 1000),
    backoff_base  interval constraint "backoff_base must be positive, at most 366 days, without months" check (rota.is_duration(backoff_base)),
    backoff_cap   interval constraint "backoff_cap must be positive, at most 366 days, without months" check (rota.is_duration(backoff_cap)),
    timeout       interval constraint "timeout must be positive, at most 366 days, without months" check (rota.is_duration(timeout)),
    delivery      text constraint "delivery must be at_least_once or at_most_once" check (delivery in ('at_least_once', 'at_most_once')),
    seen_at       timestamptz,
    paused        boolean not null default false,
    pause_reason  text,
    paused_by     text,
    paused_at     timestamptz
);
comment on table rota.handlers is 'One row per handler name, written by daemons at their start; people write only paused, by rota.pause_handler().';

create table rota.queues (
    queue         text primary key constraint "queue must be a name of 1 to 200 characters on one line" check (rota.is_name(queue)),
    paused        boolean not null default false,
    pause_reason  text,
    paused_by     text,
    paused_at     timestamptz
);
comment on table rota.queues is 'Which queues are paused. The name * stands for all of them.';

create table rota.nodes (
    node_id       uuid primary key,
    host          text not null,
    pid           integer not null,
    rota_version  text not null,
    release       text,
    app           text,
    handlers      text[] not null,
    queues        text[] not null,
    slots         jsonb not null,
    shards        integer[] not null default '{}',
    tzdata        text,
    state         text not null default 'running' constraint "state must be running or draining" check (state in ('running', 'draining')),
    started_at    timestamptz not null default now(),
    seen_at       timestamptz not null default now()
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on table rota.nodes is 'One row per living daemon process (alive: seen within 15 s). Leases decide about jobs, never these rows.';

create table rota.guards (
    resource      text primary key constraint "resource must be a name of 1 to 200 characters on one line" check (rota.is_name(resource)),
    token         bigint not null,
    seen_at       timestamptz not null default now()
);
create index prune_guards_idx on rota.guards (seen_at);
comment on table rota.guards is 'The highest fence token that rota.guard() has seen for a resource.';

create table rota.audit (
    audit_id      bigint generated always as identity primary key,
    done_at       timestamptz not null default clock_timestamp(),
    done_by       text not null default rota.caller(),
    action        text not null,
    target        text not null,
    reason        text,
    affected      bigint not null default 1
);
comment on table rota.audit is 'Who did what to which, when and why.';
