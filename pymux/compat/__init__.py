"""Other projects' interfaces, over pymux."""
