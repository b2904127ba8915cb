"""The script that trained the bundled encoder-decoder pair, loaded once for all tests."""

from foretoken.cli.train import repair_script

repair = repair_script()
