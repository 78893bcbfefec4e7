"""Clients that others wrote, unmodified, against a server that runs; `docs/clients.md` says how and what came of it."""
