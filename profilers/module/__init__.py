"""A user's module: its parts by name, and by trial what can be done with them; profilers count it, the runtime spreads it."""
