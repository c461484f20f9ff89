"""Recordings of an executor: `instrument` observes it, `statistics` counts, `recorder` and `trace` write.

`trace_file`, `trace_events` and `trace_runs` read a trace.
"""
