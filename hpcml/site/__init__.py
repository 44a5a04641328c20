"""Where to run: the site's file, its search path, and what this machine has."""
