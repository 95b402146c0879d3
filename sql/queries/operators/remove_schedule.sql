-- Delete a schedule. Its fires and jobs stay.
--   $1 name    text
--   $2 reason  text
select rota.remove_schedule($1, $2) as removed
