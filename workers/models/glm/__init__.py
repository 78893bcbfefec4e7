"""GLM's mixtures of experts.

glm4_moe       GLM-4.5, 4.6 and 4.7: grouped-query attention
glm4_moe_lite  GLM-4.7-Flash: DeepSeek-V3's layers
"""
