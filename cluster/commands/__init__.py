"""The subcommands of `watchword`, one file each."""
