"""The runtime: state machine, loop, journal, tools, providers and storage. No Ray, no process handling."""
