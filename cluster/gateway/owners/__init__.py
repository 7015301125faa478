"""What the gateway knows of workers, nodes and the directory."""
