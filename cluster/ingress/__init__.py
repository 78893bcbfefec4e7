"""HTTP on Serve, in front of all engines.

deployment      the Serve deployment
remote_engines  `cluster.http.engine_client.EngineClient`: a request's attempts, its tokens, probes; no Ray
attempts        what became of a request's attempts, and whether another is worth it
engine_links    all engines that can be reached, and which of them gets a request; no Ray
engine_link     the connection to one of them: requests out; tokens, ends and the engine's state back, in order
request_stream  what has come back of one request and is not read yet
routing         the choice: what is known of each engine, and when a first token is expected from it
coordinators    where they are, and what is asked of all at once, through Ray
refreshed       a value that is fetched anew when somebody asks, who never waits long for it
"""
