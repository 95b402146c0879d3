-- List the migrations that were applied to this database.
--   -> version int4, name text, checksum text
select version, name, checksum
from rota.migrations
order by version
