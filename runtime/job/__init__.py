"""What keeps the ranks of a job together.

`world` brings them up: `launcher` and `lineage` tell who started a process, `rendezvous` and `wireup` do
without a launcher of MPI, `joining` watches over the start. `control` and `hub` are the control plane, which
watches over the job with `watchdog`, `progress`, `run_log` and `audit`; `exits` ends a process.
"""
