"""What tests share: small networks, servers, commands and tables, under names that tell."""
