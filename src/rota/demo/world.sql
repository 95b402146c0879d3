-- The demo's own tables, which handlers and a trigger write. At the end, rota's tables are compared with them and with the handlers'
-- two files.
create schema demo;

-- Effects inside the database. There is no unique index: the demo shows that rota alone keeps each effect unique.
create table demo.entries (job_id bigint not null, fence_token bigint not null, entered_at timestamptz not null default clock_timestamp());

-- Handlers whose cause of failure is repaired, so that they succeed.
create table demo.repaired (handler text primary key);

-- Every inserted job, and every claim, extension and end of a lease. A trigger records them independently of rota.
create table demo.inserted (job_id bigint primary key, handler text not null);
create table demo.leases (
    seen_at      timestamptz not null default clock_timestamp(),
    what         text not null check (what in ('claimed', 'extended', 'ended')),
    job_id       bigint not null,
    fence_token  bigint not null,
    node         uuid not null,
    ends_at      timestamptz not null
);

create function demo.record_change() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into demo.inserted (job_id, handler) values (new.job_id, new.handler) on conflict do nothing;
    elsif old.state = 'running' and (tg_op = 'DELETE' or new.state <> 'running') then
        insert into demo.leases (what, job_id, fence_token, node, ends_at)
        values ('ended', old.job_id, old.fence_token, old.leased_by, old.lease_expires_at);
    elsif tg_op = 'UPDATE' and new.state = 'running' then
        insert into demo.leases (what, job_id, fence_token, node, ends_at)
        values (case old.state when 'running' then 'extended' else 'claimed' end, new.job_id, new.fence_token, new.leased_by,
            new.lease_expires_at);
    end if;
    return null;
end $$;

create trigger record_change after insert or update or delete on rota.jobs for each row execute function demo.record_change();
