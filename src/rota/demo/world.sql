-- The demo's own tables. What is checked at the end stands here and in two files, written by the handlers and by a trigger;
-- what rota says of itself is compared with it.
create schema demo;

-- Effects inside the database. No unique index: that each counts once is rota's doing, and what is to be shown.
create table demo.entries (job_id bigint not null, fence_token bigint not null, entered_at timestamptz not null default clock_timestamp());

-- What somebody has repaired: the handlers that failed because of it then work.
create table demo.repaired (handler text primary key);

-- Every job that was ever inserted, and every claim, extension and end of a lease, as seen from beside rota.
create table demo.inserted (job_id bigint primary key, handler text not null);
create table demo.leases (
    seen_at      timestamptz not null default clock_timestamp(),
    what         text not null check (what in ('claimed', 'extended', 'left')),
    job_id       bigint not null,
    fence_token  bigint not null,
    node         uuid not null,
    ends_at      timestamptz not null
);

create function demo.witness() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into demo.inserted (job_id, handler) values (new.job_id, new.handler) on conflict do nothing;
    elsif old.state = 'running' and (tg_op = 'DELETE' or new.state <> 'running') then
        insert into demo.leases (what, job_id, fence_token, node, ends_at)
        values ('left', old.job_id, old.fence_token, old.leased_by, old.lease_expires_at);
    elsif tg_op = 'UPDATE' and new.state = 'running' then
        insert into demo.leases (what, job_id, fence_token, node, ends_at)
        values (case old.state when 'running' then 'extended' else 'claimed' end, new.job_id, new.fence_token, new.leased_by,
            new.lease_expires_at);
    end if;
    return null;
end $$;

create trigger witness after insert or update or delete on rota.jobs for each row execute function demo.witness();
