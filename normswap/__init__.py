"""normswap: move a pretrained vision network to another normalization scheme, keeping the function it learned."""
