"""From HTTP to ranks, on Ray. The only folder, with `deploy`, that imports Ray.

`http_app` and what it is made of (`openai_api`, `edge_request`, `serving`, `generation`, `replies`, `errors`,
`tokenizer`): the OpenAI surface, without Ray. `ingress`, `engine`, `deployments`: the Serve deployments.
`supervisor`, `worker group`, `actors`, `placement`: one engine's processes. `coordinator` and `coordinator_loop`: the
scheduler's loop; `worker_loop`: a rank's; `channel`, `transport`, `messages`: what travels between them. `config`,
`assembly`: configuration, and the parts made from it.
"""
