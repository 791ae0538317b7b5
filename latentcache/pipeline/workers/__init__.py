"""Workers of a build: processes or a thread that read, encode and commit, and the scheduler that gives them work."""
