-- Run once, when the database is made: a login for the daemons, and one for whoever inserts jobs. The roles get their rights
-- from `rota migrate --roles`; that they are here already doesn't matter to it.
create role rota_daemon nologin;
create role rota_client nologin;
create role daemon login password 'daemon' in role rota_daemon;
create role client login password 'client' in role rota_client;
-- To see who holds a snapshot: rota_oldest_snapshot_seconds, and `rota check`.
grant pg_read_all_stats to daemon;
