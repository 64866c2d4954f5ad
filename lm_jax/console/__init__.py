"""The command line: flags, config files, help, exit codes, text for the terminal."""
