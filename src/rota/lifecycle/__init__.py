"""The path of a job through one daemon.

::

    rota.jobs --(2 dispatcher: claim, SKIP LOCKED, lease + token)--> running --(3 executor)--> outcome
        ^                                                               ^                         |
        |                                            (4 heartbeat: extend the lease)              |
        |                                                                          (5 retry planner: decide)
        |                                                                                         |
        +----- retry, release ------------- (6 settle: one fenced statement) <--------------------+
                                                 '--> rota.job_runs, rota.dead_letters

    1 wake            when to look: notification, freed slot, next due instant, stop
    2 dispatcher      due rows -> claims, never more than the free slots
    3 executor        claim -> outcome; timeout, interruption, the one broad except
    4 heartbeat       extend the leases of what runs here; tell of what was lost (on its own thread)
    5 retry_planner   outcome -> settlement, purely
    6 settle          settlements -> fenced statements, with whatever gathered meanwhile

`running` is what they share: the attempts under way, and the slots they take.

Who may change which state: only a claim makes a job running; only a settlement whose token and owner match, a reaper that
proves in the same statement that the lease has expired, or a forced cancel takes it out of running. A retry, a release and
a redrive make it scheduled; nothing else does.

Locks: every statement that touches many jobs locks them in the order of job_id, by SKIP LOCKED, and never waits for a row.
A handler's own transaction touches its job's row in its last statement only.
"""
