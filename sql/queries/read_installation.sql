-- Say which installation this database holds.
--   -> installation_id text?
select meta.installation_id::text as installation_id
from rota.meta
