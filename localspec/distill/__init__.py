"""`localspec distill`: a drafter for the GGUF at hand, trained on what that very model says.

In the order of work: `store` (chats and features on disk), `chats` (how a chat comes about), `synthesise` (the target
asks and answers itself while its layer inputs are kept), `model` (the drafter in torch), `train`, `export`.
"""
