-- Create the ledger's partitions for the coming days, and drop partitions whose last row is older than $1 (0: drop none).
--   $1 keep  interval
--   -> made int4?, dropped int4?
select rotated.made, rotated.dropped
from rota.rotate_ledger(keep => $1) as rotated
