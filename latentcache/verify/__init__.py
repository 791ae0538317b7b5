"""Still true? Checks that return findings: what is stale, damaged or missing, and the command that mends it."""
