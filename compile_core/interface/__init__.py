"""What people call (compile, explain, disable, run) and the plug-ins that claim whole modules."""
