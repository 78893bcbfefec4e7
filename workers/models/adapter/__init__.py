"""Every decoder that `transformers` knows and no family of ours does: its own modules, with our linear layers,
vocabulary and attention in their places.

`survey` runs a model on the meta device and writes down each of its calls of attention; `config` makes a `ModelConfig`
of them; `layers` puts our layers into the model; `model` is the target that the runner calls.
"""
