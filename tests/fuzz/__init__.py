"""Every reader of files and messages against damaged ones: it accepts, or refuses with an error of clipwise."""
