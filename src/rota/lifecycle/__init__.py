"""The path of a job through one daemon.

::

    rota.schedules --(7 scheduler: decide each due instant once)--> rota.fires
                                     |
                                     v
    rota.jobs --(2 dispatcher: claim, SKIP LOCKED, lease + token)--> running --(3 executor)--> outcome
        ^                                                               ^                         |
        |                                            (4 heartbeat: extend the lease)              |
        |                                                                          (5 retry planner: decide)
        |                                                                                         |
        +----- retry, release ------------- (6 settle: one fenced statement) <--------------------+
                                                 '--> rota.job_runs, rota.dead_letters

    1 wake            when to look: notification, freed slot, next due instant, stop
    2 dispatcher      due rows -> claims, never more than the free slots
      lanes           which lanes a claim searches and when: floors, sweeps, pages of queues
      suspects        how many jobs that lost their worker twice may run at once
    3 executor        claim -> outcome; timeout, interruption, the one broad except
    4 heartbeat       extend the leases of what runs here; tell of what was lost (on its own thread)
    5 retry_planner   outcome -> settlement, purely
    6 settle          settlements -> fenced statements, with whatever gathered meanwhile
    7 scheduler       due schedules -> fires + jobs, once for each schedule and instant
    8 drain           the end of the node: what runs may end, is interrupted, or is left to its lease

`running` is what they share: the attempts under way, and the slots they take.

Who may change which state: only a claim makes a job running; only a settlement whose token and owner match, a reaper that
proves in the same statement that the lease has expired, or a forced cancel takes it out of running. A retry, a release and
a redrive make it scheduled; nothing else does.

Who decides about a due instant: whoever first writes to the schedule's clock where version and next_fire_at are still what was
read. That statement inserts the job and the fire's row. Edits take the same lock, record what was due, and raise the version.
A backfill takes that lock, too, and enqueues only what is behind the clock and has no row of its own.
Whether a job of the schedule is live (overlap) the partial unique index on rota.jobs decides, never a read.

Locks: clocks before jobs before fires. Every statement that touches many jobs locks them in the order of job_id, by SKIP
LOCKED, and never waits for a row; the same holds for clocks, in the order of schedule_id.
A handler's own transaction touches its job's row in its last statement only.
"""
