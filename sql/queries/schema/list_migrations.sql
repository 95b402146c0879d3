-- List the migrations that this database has seen.
--   -> version int4, name text, checksum text
select version, name, checksum
from rota.migrations
order by version
