"""The script that trained the bundled encoder-decoder pair, and its tasks, loaded once for all tests."""

import sys

from foretoken.cli.train import repair_script

repair = repair_script()
tasks = sys.modules["repair_tasks"]
