"""Block drafts: one pass over a block of mask tokens drafts all tokens of a round.

config   the layout of a block, and config.json of published heads
dflash   DFlash: method and model
dspark   DSpark: a Markov head; the bias on logits that Domino shares
domino   Domino: a bias that depends on the whole path
dflash2  DFlash2: convolutions and a selector
drafter  drafts chains and trees from one pass
"""
