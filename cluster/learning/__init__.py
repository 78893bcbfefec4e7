"""A draft that learns from the texts that its engine writes (docs/learning-draft.md).

config          the section of the configuration
reservoir       the texts, in memory, with a limit for each key
draft_learning  turns texts into candidates, in the actor `aerie.cluster.replica.learner_actor`
replica_first   one engine trains; others get a draft that has proved itself there
gate            whether a candidate is better than the served draft
published       the coordinator's side: collects texts, loads drafts, takes one back
engine_busy     tells the training whether the engine has requests
watch           notices that a published draft accepts less than the one before
"""
