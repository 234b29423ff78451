"""A job that goes on when a rank dies: the supervisor in the launcher, and what the surviving ranks do."""
