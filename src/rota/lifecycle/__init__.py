"""The path of a job through one daemon.

::

    rota.schedules --(scheduler: decide each due instant once)----> rota.fires
                                     |
                                     v
    rota.jobs --(dispatcher: claim, SKIP LOCKED, lease + token)----> running --(executor)----> outcome
        ^                                                               ^                         |
        |                                            (heartbeat: extend the lease)                |
        |                                                                          (retry planner: decide)
        |                                                                                         |
        +----- retry, release ------------- (settle: one fenced statement)-- <--------------------+
                                                 '--> rota.job_runs, rota.dead_letters

    wake              ends a wait: after a notification, a freed slot, a pause, or the order to stop
    dispatcher        due rows -> claims
      lanes           which lanes a claim searches and when: floors, sweeps, pages of queues
      slots           how many jobs may run, and how many are claimed ahead of the slots while jobs are quick
      suspects        how many jobs that lost their worker twice may run at once
      refused_jobs    when a job is tried again whose row the database refuses
    executor          claim -> call of the handler, with its timeout and interruption
      call_outcome    what the call did -> outcome
    heartbeat         extends the leases of this node's attempts, on its own thread
    retry_planner     outcome -> settlement, a pure function
    settle            settlements -> fenced statements, in batches
      settlement_rows the arguments of these statements, and their log lines
    scheduler         due schedules -> fires and jobs, once for each schedule and instant
    drain             the end of the node: jobs end, are interrupted, or run again when their lease ends

`running` is shared by all of them: it holds the attempts of this node and the slots that they occupy.

State changes. Only a claim makes a job running. A job leaves the state running by a settlement whose token and owner match, by a
reaper that proves in the same statement that the lease has expired, or by a forced cancel. Only a retry, a release or a redrive
makes it scheduled again.

Due instants. The first node that updates the schedule's clock decides, if version and next_fire_at are unchanged since it read
them. That statement inserts the job and the fire. Edits take the same lock, record the instants that were due, and raise the
version. A backfill takes the lock, too, and enqueues only past instants that have no fire.
The partial unique index on rota.jobs decides whether a job of the schedule is live (overlap), never a read.

Locks. Clocks before jobs before fires. Every statement over many jobs locks them in the order of job_id with SKIP LOCKED, so it
never waits for a row. The same holds for clocks, in the order of schedule_id.
A handler's own transaction touches its job's row in its last statement only.
"""
