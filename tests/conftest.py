"""Settings for all tests: threads that sleep while they wait, so that tests share a machine in peace."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
