"""HTTP on Serve, in front of all engines.

deployment      the Serve deployment
remote_engines  implements `cluster.http.engine_client.EngineClient`: attempts, tokens, probes; no Ray
attempts        the attempts of a request, and whether to try again
engine_links    connections to all engines, and the choice of one; no Ray
engine_link     the connection to one engine
request_aborts  aborts of requests whose readers are gone, sent until the engine takes them
request_stream  received but unread tokens of one request
routing         estimates when each engine would send a first token
coordinators    finds coordinators, and calls all of them, through Ray
refreshed       a value that is fetched again when it is old
"""
