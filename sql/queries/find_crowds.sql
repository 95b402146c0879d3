-- Find instants that come next and that many schedules share, none of which has any jitter.
--   $1 more_than  int8
--   $2 name       text  only those of the instant at which this schedule comes next; null: all
--   -> next_fire_at timestamptz?, schedules int8?, sample text?
select clock.next_fire_at, count(*) as schedules, min(definition.name) as sample
from rota.schedule_clocks as clock
join rota.schedule_definitions as definition on definition.schedule_id = clock.schedule_id
where clock.next_fire_at > timestamptz '-infinity'
  and definition.jitter = interval '0'
  and (
      $2::text is null
      or clock.next_fire_at = (
          select schedule.next_fire_at
          from rota.schedules as schedule
          where schedule.name = $2
            and schedule.jitter = interval '0'
      )
  )
group by clock.next_fire_at
having count(*) > $1
order by clock.next_fire_at
limit 10
