-- Raise the sequence of fence tokens above the database's clock in microseconds, where it lags behind.
--   -> raised bool?
select rota.raise_fence_tokens() as raised
