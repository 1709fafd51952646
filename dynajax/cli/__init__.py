"""The command line ``dynajax``: the only place that reads arguments and the environment."""

from dynajax.cli.main import main as main
