"""Trains the bundled demonstration model: data from grammars, a `glm5_next` in PyTorch, export, evaluation, reference data.

    python -m tools.train_demo.train --out RUN --seed 0 --seconds 540     # needs a GPU and the extra `train`
    python -m tools.train_demo.evaluate RUN                               # by length and depth, on the GPU
    python -m tools.train_demo.reference RUN expected.safetensors         # reference data, by transformers' own class
    python -m tools.train_demo.through_services RUN                       # the same questions through the real services

Nothing here is part of the product, which needs no PyTorch.
"""
