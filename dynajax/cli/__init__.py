"""The ``dynajax`` command: one small file a subcommand; the only place that reads argv and the environment."""
