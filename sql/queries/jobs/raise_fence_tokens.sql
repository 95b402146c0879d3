-- Raise the sequence of fence tokens to the database's clock in microseconds, if it is behind.
--   -> raised bool?
select rota.raise_fence_tokens() as raised
