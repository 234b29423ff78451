"""The runtime of one rank without memory, time or other ranks: what runs, what is present when, what is sent."""
