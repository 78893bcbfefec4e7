"""Operations on the logits of a vocabulary shard.

topk_log_softmax  the k best log-probabilities of each row; the largest logit of each row, and its column
"""
