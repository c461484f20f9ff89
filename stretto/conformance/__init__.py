"""What an engine must keep, as cases that a vendor can run.

`stretto conform ENGINE` runs them; so does ``pytest -p stretto.conformance --stretto-engine=ENGINE``, a test
for each (`pytest_plugin`); `cases.conform` gives what becomes of them one after the other. The cases of the
protocol alone, for an engine that is not registered: `stretto.engine_check.checks_of`.
"""

pytest_plugins = ["stretto.conformance.pytest_plugin"]
