"""Commands and their work folders: flags, configs, durable files, several processes, stopping."""
