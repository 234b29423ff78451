"""Offload schedules: what lies on the host or on storage, and when it travels."""
