"""HTTP on Serve, in front of all engines.

deployment       the Serve deployment; finds coordinators through Ray, and calls all of them
remote_engines   implements `aerie.cluster.http.engine_client.EngineClient`: retries, tokens, probes; no Ray; a cached
                 value that is fetched again when it is too old
attempts         the attempts of a request, and whether to try again; tokens of one request that are received but not
                 read yet
engine_links     the connections to all engines, and the choice of one; no Ray; the connection to one engine; aborts
                 of requests whose clients are gone
adapter_changes  loads and unloads of LoRA adapters, repeated for engines that were built later
routing          chooses an engine by the expected time of the first token
"""
