-- Run once, when the database is made: a login for the daemons, and one for clients that insert jobs.
-- `rota migrate --roles` grants the roles their rights later. It accepts existing roles.
create role rota_daemon nologin;
create role rota_client nologin;
create role daemon login password 'daemon' in role rota_daemon;
create role client login password 'client' in role rota_client;
-- Needed to see the sessions that hold a snapshot: rota_oldest_snapshot_seconds, and `rota check`.
grant pg_read_all_stats to daemon;
