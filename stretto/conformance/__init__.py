"""What an engine must keep, as cases that a vendor can run: `stretto conform`."""
