"""Operations over the logits of a vocabulary shard.

largest           the largest logit of each row, and its column
topk_log_softmax  the best few, with their log-probabilities
"""
