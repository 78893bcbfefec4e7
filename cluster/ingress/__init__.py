"""HTTP on Serve, in front of all engines.

deployment       the Serve deployment
remote_engines   implements `aerie.cluster.http.engine_client.EngineClient`: retries, tokens, probes; no Ray
attempts         the attempts of a request, and whether to try again
engine_links     the connections to all engines, and the choice of one; no Ray
adapter_changes  loads and unloads of LoRA adapters, repeated for engines that were built later
engine_link      the connection to one engine; aborts of requests whose clients are gone
request_stream   tokens of one request that are received but not read yet
routing          chooses an engine by the expected time of the first token
coordinators     finds coordinators through Ray, and calls all of them
refreshed        a cached value that is fetched again when it is too old
"""
