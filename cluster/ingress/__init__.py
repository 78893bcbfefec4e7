"""HTTP on Serve, in front of all engines.

deployment      the Serve deployment, and what it takes from Serve and Ray
refreshed       a value that is fetched anew when somebody asks, who never waits long for it
remote_engines  `cluster.http.engine_client.EngineClient` over Serve calls and one ZeroMQ socket; no Ray
"""
