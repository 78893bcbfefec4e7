"""HTTP on Serve, in front of all engines.

deployment      the Serve deployment, and what it takes from Serve and Ray
remote_engines  `cluster.http.engine_client.EngineClient` over Serve calls and one ZeroMQ socket; no Ray
"""
